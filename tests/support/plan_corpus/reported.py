"""The programs in which planned memory was first found to be off, unchanged in shape."""

import weft as wf

from .case import case, param, spec


@case("stencil", "x=4 y=2", "h:x w:y", spec("h=2048 w=2048"))
def stencil(u):
    def step(_, u):
        rows = wf.shift(u, "h", 1) + wf.shift(u, "h", -1)
        return u + 0.1 * (rows + wf.shift(u, "w", 1) + wf.shift(u, "w", -1) - 4 * u)

    return wf.fori_loop(0, 6, step, u)


@case("conv+norm", "x=4 y=2", "h:x", param("kh=3 kw=3 c=32 o=64"), spec("b=8 h=64 w=64 c=32"))
@wf.value_and_grad
def conv_norm(kernel, x):
    y = wf.conv(x, kernel, window={"h": "kh", "w": "kw"}, padding="SAME")
    y = (y - wf.mean(y, ["h", "w"])) * wf.rsqrt(wf.var(y, ["h", "w"]) + 1e-5)
    return wf.mean(wf.square(y))


@case("vmap softmax", "x=4 y=2", "b:x", param("d=256 e=1024"), spec("b=2048 d=256"))
@wf.value_and_grad
def vmap_softmax(w, x):
    def row(r):
        return wf.sum(wf.square(wf.softmax(wf.einsum(r, w, reduce="d"), "e")))

    return wf.mean(wf.vmap(row, "b")(x))


@case("sort+cumsum", "x=4 y=2", "a:x", spec("a=4096 b=512"))
def sort_cumsum(x):
    return wf.cumsum(wf.sort(x, "a"), "a") * wf.softmax(x, "b")


@case("rows and columns", "x=4 y=2", "b:x", spec("b=2048 c=2048"))
@wf.value_and_grad
def rows_and_columns(logits):
    return wf.mean(wf.logsumexp(logits, "c") - wf.logsumexp(logits, "b"))
