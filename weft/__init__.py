"""Weft: distributed tensor programs over named dimensions.

`NAMES` lists the public names by module. A module is imported when one of its names is first used, and JAX
with it, so `weft --help` waits for neither. `__init__.pyi` has the same names for type checkers and editors.
"""

# Nothing is imported here, not even typing: this file runs before the command line can handle Ctrl-C.

NAMES = {
    "core.dims": "Dim DimLike DimsLike dims",
    "core.mesh": "Mesh MeshLike",
    "core.layout": "Layout LayoutLike",
    "core.tensor": "Tensor is_tensor tree_map",
    "core.placement": "tensor spec parameter place",
    "core.program": "spmd Program",
    "core.eval_shape": "eval_shape",
    "core.exported": "ExportedProgram load",
    "core.role_layout": "store under_layout",
    "core.devices": "cpu_devices",
    "core.errors": """
        WeftError CheckpointError CheckpointWarning CompileError DataError DataWarning DimError
        DistributedError HardwareError LayoutError LayoutWarning MeshError MissingExtraError ModelError
        PeerTimeoutError ProgramError RunFolderError ShapeError TensorAttributeError TensorTypeError
        TrainingError VerificationError""",
    "ops.elementwise": """
        abs add arccos arccosh arcsin arcsinh arctan arctan2 arctanh astype bitwise_and bitwise_not
        bitwise_or bitwise_xor cbrt ceil clip conj cos cosh divide elu equal erf erfc erfinv exp exp2
        expm1 floor floor_divide gelu greater greater_equal hypot imag isclose isfinite isinf isnan
        leaky_relu left_shift less less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp
        logical_and logical_not logical_or logical_xor maximum minimum mod multiply negative not_equal
        pow power real reciprocal relu relu6 remainder right_shift round rsqrt selu sigmoid sign silu
        sin sinh softplus softsign sqrt square stop_gradient subtract swish tan tanh where""",
    "ops.einsum": "einsum",
    "ops.reduce": """
        all allclose any log_softmax logsumexp max mean median min prod quantile softmax std sum var""",
    "ops.shape": "broadcast_to flatten merge rename reshape split stack transpose unflatten unstack",
    "ops.indexing": "index slice update",
    "ops.shifting": "concat diff flip pad roll shift",
    "ops.lookup": "one_hot scatter_add take",
    "ops.sorting": "approx_max_k argmax argmin argsort cumprod cumsum searchsorted sort top_k",
    "ops.creation": """
        arange eye from_callback full full_like linspace ones ones_like tril triu zeros zeros_like""",
    "ops.conv": "conv",
    "ops.pool": "avg_pool max_pool windows",
    "ops.scan": "scan",
    "ops.associative_scan": "associative_scan",
    "ops.control": "cond fori_loop switch while_loop",
    "ops.vmap": "vmap",
    "ops.map": "map",
    "ops.local": "callback debug local",
    "random.draws": "dropout",
    "autodiff.grad": "grad value_and_grad jvp vjp",
    "autodiff.jacobian": "hessian jacobian",
    "autodiff.custom": "custom_vjp",
    "autodiff.remat": "remat",
    "pipelines.pipeline": "pipeline",
    "plan.plan": "Plan",
    "compilers.compiled": "Compiled",
    "verification": "verify",
    "autolayout.ranking": "search",
    "ops.optax": "optimizer",
}
MODULES = "random linalg fft distributed nn models optim checkpoint data train generate serve"
ELSEWHERE = {  # names that other libraries use, with Weft's
    **dict.fromkeys(["dot", "matmul", "tensordot", "inner", "outer"], "einsum"),
    **dict.fromkeys(["permute", "swapaxes", "moveaxis"], "transpose"),
    **dict.fromkeys(["concatenate", "cat"], "concat"),
    **dict.fromkeys(["gather", "embedding"], "take"),
    **dict.fromkeys(["expand_dims", "unsqueeze"], "broadcast_to"),
    "jit": "spmd",
    "array": "tensor",
}

_MODULE_OF = {name: module for module, names in NAMES.items() for name in names.split()}
__all__ = [*_MODULE_OF, "random", "linalg", "fft"]


def __getattr__(name):
    import importlib

    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    elif name in MODULES.split():
        value = importlib.import_module(f".{name}", __name__)
    elif name == "__version__":
        value = importlib.import_module("importlib.metadata").version(__name__)
    else:
        from .core.errors import nearest

        close = "" if name.startswith("_") else nearest(name, __dir__())
        close = f" (here it is {ELSEWHERE[name]})" if name in ELSEWHERE else close
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{close}")
    globals()[name] = value
    return value


def __dir__():
    return sorted([*_MODULE_OF, *MODULES.split()])
