"""Convolutions, norms and pooling."""

import weft as wf

from .case import case, param, spec

IMAGE = {"h": "kh", "w": "kw"}


def norm(x, dims):
    x = x - wf.mean(x, dims)
    return x * wf.rsqrt(wf.mean(wf.square(x), dims) + 1e-5)


@case(
    "audio conv",
    "x=8",
    "t:x",
    param("k=9 c=16 o=32"),
    param("k=9 o=32 p=32"),
    spec("b=4 t=16001 c=16"),
    spec("b=4 p=32"),
)
@wf.value_and_grad
def audio(first, second, sound, target):
    y = wf.gelu(wf.conv(sound, first, {"t": "k"}, dilation=2))
    y = norm(wf.conv(y, second, {"t": "k"}, stride=2), ["t"])
    return wf.mean(wf.square(wf.mean(wf.relu(y), "t") - target))


@case(
    "ResNet block",
    "x=4 y=2",
    "b:x",
    param("kh=3 kw=3 c=32 m=32"),
    param("kh=3 kw=3 m=32 c=32"),
    spec("b=32 h=32 w=32 c=32"),
)
@wf.value_and_grad
def resnet_block(first, second, x):
    y = wf.relu(norm(wf.conv(x, first, IMAGE), ["b", "h", "w"]))
    y = norm(wf.conv(y, second, IMAGE), ["b", "h", "w"])
    return wf.mean(wf.square(wf.relu(x + y)))


@case(
    "depthwise net",
    "x=2",
    "b:x",
    param("kh=3 kw=3 c=32"),
    param("c=32 o=64"),
    param("kh=3 kw=3 o=64 p=64"),
    param("p=64 label=10"),
    spec("b=15 h=48 w=48 c=32"),
    spec("b=15 label=10"),
)
@wf.value_and_grad
def depthwise_net(depthwise, pointwise, strided, head, x, target):
    y = wf.conv(x, depthwise, IMAGE, out=x.dims)
    y = wf.relu(wf.einsum(y, pointwise, reduce="c"))
    y = wf.max_pool(wf.relu(wf.conv(y, strided, IMAGE, stride=2)), {"h": 2, "w": 2})
    logits = wf.einsum(wf.mean(y, ["h", "w"]), head, reduce="p")
    return -wf.mean(wf.sum(target * wf.log_softmax(logits, "label"), "label"))


@case("image pyramid", "x=4 y=2", "h:x w:y", param("kh=4 kw=4"), spec("b=4 h=512 w=512 c=3"))
def pyramid(kernel, image):
    details = []
    for _ in range(3):
        small = wf.avg_pool(image, {"h": 2, "w": 2})
        large = wf.conv(small, kernel, IMAGE, out=small.dims, stride=2, transpose=True)
        details.append(image - large)
        image = small
    return details, image


@case("style loss", "", "", spec("h=256 w=256 c=3"), spec("o=32 q=32"), param("kh=3 kw=3 c=3 o=32"))
@wf.value_and_grad
def style(image, target, kernel):
    features = wf.relu(wf.conv(image, kernel, IMAGE))
    gram = wf.einsum(features, features.rename(o="q"), reduce=["h", "w"]) / 65536.0
    smooth = wf.mean(wf.abs(image - wf.shift(image, "h", 1)))
    return wf.sum(wf.square(gram - target)) + 0.1 * smooth


@case(
    "MLP-mixer",
    "x=4 y=2",
    "b:x m:y e:y",
    param("p=196 m=384"),
    param("m=384 p=196"),
    param("c=128 e=512"),
    param("e=512 c=128"),
    spec("b=32 p=196 c=128"),
    spec("b=32 p=196 c=128"),
)
@wf.value_and_grad
def mixer(token_in, token_out, channel_in, channel_out, x, target):
    y = wf.gelu(wf.einsum(norm(x, "c"), token_in, reduce="p"))
    x = x + wf.einsum(y, token_out, reduce="m")
    y = wf.gelu(wf.einsum(norm(x, "c"), channel_in, reduce="c"))
    x = x + wf.einsum(y, channel_out, reduce="e")
    return wf.mean(wf.square(norm(x, "c") - target))
