"""Stencils, integrators and Monte Carlo: loops over fields and particles."""

import weft as wf

from .case import KEY, case, grads, param, spec


def laplacian(u, dims, **options):
    neighbours = [wf.shift(u, d, by, **options) for d in dims for by in (1, -1)]
    return sum(neighbours[1:], neighbours[0]) - 2.0 * len(dims) * u


@case("wave equation", "x=4 y=2", "h:x w:y", spec("h=1536 w=2048"), spec("h=1536 w=2048"))
def wave(u, before):
    def step(_, carry):
        u, before = carry
        return 2.0 * u - before + 0.2 * laplacian(u, ["h", "w"]), u

    return wf.fori_loop(0, 8, step, (u, before))


@case("game of life", "x=8", "h:x", spec("h=2044 w=1024", bool))
def life(alive):
    def step(_, alive):
        cells = alive.astype("int32")
        rows = cells + wf.roll(cells, "h", 1) + wf.roll(cells, "h", -1)
        around = rows + wf.roll(rows, "w", 1) + wf.roll(rows, "w", -1) - cells
        return wf.logical_or(around == 3, wf.logical_and(alive, around == 2))

    return wf.fori_loop(0, 10, step, alive)


@case("heat 3D", "x=4 y=2", "d:x h:y", spec("d=160 h=96 w=128"))
def heat_3d(u):
    def step(u, _):
        u = u + 0.1 * laplacian(u, ["d", "h", "w"], wrap=True)
        return u, wf.mean(wf.square(u))

    return wf.scan(step, u, wf.arange(wf.Dim("steps", 12)), "steps")


@case("Lorenz, RK4", "", "", spec("n=200000"), spec("n=200000"), spec("n=200000"))
def lorenz(x, y, z):
    def slope(s):
        x, y, z = s
        return 10.0 * (y - x), x * (28.0 - z) - y, x * y - 2.667 * z

    def moved(s, k, h):
        return tuple(a + h * b for a, b in zip(s, k, strict=True))

    def step(s, _):
        k1 = slope(s)
        k2 = slope(moved(s, k1, 0.005))
        k3 = slope(moved(s, k2, 0.005))
        k4 = slope(moved(s, k3, 0.01))
        k = tuple((a + 2.0 * b + 2.0 * c + d) / 6.0 for a, b, c, d in zip(k1, k2, k3, k4, strict=True))
        s = moved(s, k, 0.01)
        return s, s[0]

    return wf.scan(step, (x, y, z), wf.arange(wf.Dim("t", 20)), "t")


@case(
    "neural ODE",
    "x=4 y=2",
    "b:x h:y",
    param("d=64 h=512"),
    param("h=512 d=64"),
    spec("b=512 d=64"),
    spec("b=512 d=64"),
)
@grads(0, 1)
def neural_ode(w, v, x, target):
    def slope(x):
        return wf.einsum(wf.tanh(wf.einsum(x, w, reduce="d")), v, reduce="h")

    def step(x, _):
        middle = x + 0.05 * slope(x)
        return x + 0.1 * slope(middle), None

    x, _ = wf.scan(step, x, wf.arange(wf.Dim("t", 10)), "t")
    return wf.mean(wf.square(x - target))


@case("N-body", "x=8", "n:x", spec("n=2500 xyz=3"), spec("n=2500 xyz=3"), spec("n=2500"))
def n_body(position, velocity, mass):
    def step(_, carry):
        position, velocity = carry
        others, masses = position.rename(n="m"), mass.rename(n="m")
        offset = others - position
        weight = masses * wf.power(wf.sum(wf.square(offset), "xyz") + 1e-3, -1.5)
        velocity = velocity + 0.01 * wf.einsum(weight, offset, reduce="m")
        return position + 0.01 * velocity, velocity

    return wf.fori_loop(0, 5, step, (position, velocity))


@case("conjugate gradient", "x=4 y=2", "h:x w:y", spec("h=1024 w=1024"))
def conjugate_gradient(b):
    def unfinished(state):
        return state[3] > 1e-6

    def step(state):
        x, r, p, rr = state
        ap = p - 0.2 * laplacian(p, ["h", "w"])
        alpha = rr / wf.sum(p * ap)
        x, r = x + alpha * p, r - alpha * ap
        new = wf.sum(wf.square(r))
        return x, r, r + (new / rr) * p, new

    return wf.while_loop(unfinished, step, (wf.zeros_like(b), b, b, wf.sum(wf.square(b))))[0]


@case("option pricing", "x=8", "path:x", param(""), param(""), KEY)
@grads(0, 1)
def option_price(spot, volatility, key):
    path, day = wf.dims("path=60001 day=64")
    noise = wf.random.normal(key, [path, day])
    log_price = wf.cumsum(volatility * noise / 8.0 - 0.5 * wf.square(volatility) / 64.0, "day")
    average = wf.mean(spot * wf.exp(log_price), "day")
    return wf.mean(wf.relu(average - 1.0))
