"""Clustering, transport, mixtures, Gaussian processes and spectra: numerical work without networks."""

import jax
import jax.numpy as jnp

import weft as wf

from .case import case, spec


@case("k-means", "x=8", "n:x", spec("n=8003 d=32"), spec("k=64 d=32"))
def k_means(points, centers):
    k = centers.dims[0]

    def step(_, centers):
        nearest = wf.argmin(wf.sum(wf.square(points - centers), "d"), "k")
        zero = wf.zeros(centers.dims)
        total = wf.scatter_add(zero, nearest, points, "k")
        count = wf.scatter_add(wf.zeros([k]), nearest, 1.0, "k")
        return total / wf.maximum(count, 1.0)

    return wf.fori_loop(0, 10, step, centers)


@case("Sinkhorn", "x=4 y=2", "n:x m:y", spec("n=1500 d=3"), spec("m=1500 d=3"))
def sinkhorn(x, y):
    cost = wf.sum(wf.square(x), "d") + wf.sum(wf.square(y), "d") - 2.0 * wf.einsum(x, y, reduce="d")
    score = -cost / 0.05

    def step(_, carry):
        f, g = carry
        f = -wf.logsumexp(score + g, "m")
        return f, -wf.logsumexp(score + f, "n")

    f, g = wf.fori_loop(0, 20, step, (wf.zeros(x.dims[:1]), wf.zeros(y.dims[:1])))
    return wf.sum(wf.exp(score + f + g) * cost)


@case(
    "mixture of Gaussians",
    "x=8",
    "n:x",
    spec("n=120000 d=16"),
    spec("k=24 d=16"),
    spec("k=24 d=16"),
    spec("k=24"),
)
def mixture(points, mean, variance, weight):
    def step(state, _):
        mean, variance, weight = state
        inverse = 1.0 / variance
        distance = (
            wf.einsum(wf.square(points), inverse, reduce="d")
            - 2.0 * wf.einsum(points, mean * inverse, reduce="d")
            + wf.sum(wf.square(mean) * inverse + wf.log(variance), "d")
        )
        score = wf.log(weight) - 0.5 * distance
        likelihood = wf.mean(wf.logsumexp(score, "k"))
        share = wf.softmax(score, "k")
        count = wf.sum(share, "n") + 1e-6
        mean = wf.einsum(share, points, reduce="n") / count
        variance = wf.einsum(share, wf.square(points), reduce="n") / count - wf.square(mean) + 1e-3
        return (mean, variance, count / 120000.0), likelihood

    return wf.scan(step, (mean, variance, weight), wf.arange(wf.Dim("steps", 15)), "steps")


@case(
    "Gaussian process",
    "x=4",
    "expert:x",
    spec("expert=6 n=384 d=8"),
    spec("expert=6 n=384"),
    spec("q=256 d=8"),
)
def gaussian_process(x, y, queries):
    def kernel(a, b):
        distance = wf.sum(wf.square(a), "d") + wf.sum(wf.square(b), "d") - 2.0 * wf.einsum(a, b, reduce="d")
        return wf.exp(-0.5 * distance)

    expert, n, _ = x.dims

    def solve(gram, y):
        factor = jnp.linalg.cholesky(gram + 0.1 * jnp.eye(n.size))
        return jax.vmap(lambda f, y: jax.scipy.linalg.cho_solve((f, True), y))(factor, y)

    gram = wf.transpose(kernel(x, x.rename(n="m")), [expert, n, n.rename("m")])
    alpha = wf.local(solve, gram, y, out=y.dims, splittable=["expert"])
    return wf.mean(wf.einsum(kernel(queries, x), alpha, reduce="n"), "expert")


@case("spectral features", "x=4 y=2", "b:x f:y", spec("b=64 time=32768"), spec("f=256 mel=40"))
def spectral(sound, mel):
    k, f = wf.dims("k=512 f=256")
    frames = wf.windows(sound, "time", k, stride=256)
    phase = 2.0 * jnp.pi / k.size * wf.arange(k, "float32") * wf.arange(f, "float32")
    hann = 0.5 - 0.5 * wf.cos(2.0 * jnp.pi / k.size * wf.arange(k, "float32"))
    real = wf.einsum(frames, hann * wf.cos(phase), reduce="k")
    imaginary = wf.einsum(frames, hann * wf.sin(phase), reduce="k")
    power = wf.square(real) + wf.square(imaginary)
    bands = wf.log(wf.einsum(power, mel, reduce="f") + 1e-6)
    return bands - wf.mean(bands, "time")


@case("retrieval", "x=8", "doc:x", spec("query=512 e=64"), spec("doc=20001 e=64"))
def retrieval(queries, docs):
    score = wf.einsum(queries, docs * wf.rsqrt(wf.sum(wf.square(docs), "e") + 1e-6), reduce="e")
    best, index = wf.top_k(score, "doc", wf.Dim("rank", 10))
    return wf.softmax(best, "rank"), index
