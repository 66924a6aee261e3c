"""Mixture of experts: many feed-forward blocks; each token is routed to one or two of them.

A router scores the experts for each token, which is sent to the best one (`top=1`, the Switch Transformer) or
the best two (`top=2`, GShard). Every expert has a fixed capacity for the tokens of one *group*, by default a
batch row. Tokens fill it in order, second choices after all first ones; tokens beyond the capacity are
dropped by that expert. Groups are data, not devices, so which tokens are dropped does not depend on the
layout.

    tokens         [batch, length, d_model]
    router         [batch, length, choices]               `choices` are the experts, and never split with them
    sent           [experts, batch, capacity, d_model]    a lookup: the token in each slot
    experts        [experts, batch, capacity, d_ff]
    back           [batch, slots, d_model]                `slots` are choices times capacity
    result         [batch, length, d_model]               a lookup: the slots of each token

The two lookups replace products with one-hot tensors [batch, length, experts, capacity], which would cost
`length / d_ff` times as much as the experts themselves.

A layout needs only the rule `experts:axis`. The exchange happens between `choices` and `experts`. If batch
and experts share an axis, it is an all-to-all: next to the experts, the batch is then called `groups`. If the
batch is split over more axes than the experts, give `groups` the others: `batch:data+expert experts:expert
groups:data`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp

import weft as wf
from weft.core.dims import DimLike, as_dim, dim_name
from weft.core.errors import DimError, LayoutError, ShapeError, nearest
from weft.core.tensor import Tensor

from .feedforward import FeedForward
from .linear import Linear, check_features
from .module import Module, stack

GROUPS_DIM = "groups"  # the name of the group's dim next to experts that are split over the same axis


class RouterLosses(NamedTuple):
    """Auxiliary losses of a router: scalars to add to the loss with small factors.

    Attributes:
      balance: the number of experts times Σ_e f_e·P_e, where f_e is the share of a group's tokens whose
        first choice is e, and P_e its mean probability; averaged over groups. Uniform routing gives 1.
      z: the mean over tokens of logsumexp(logits)².
    """

    balance: Tensor
    z: Tensor


class GroupLosses(NamedTuple):
    """The terms of the router losses, for each group: its balance, and the sum of its tokens' z."""

    balance: Tensor
    z: Tensor

    def mean(self, tokens: int, weights: Tensor | None = None) -> RouterLosses:
        """The losses, averaged over groups.

        Args:
          tokens: the number of tokens in each group.
          weights: over the dims of groups and tokens; groups of weight 0 don't count.
        """
        if weights is None:
            return RouterLosses(wf.mean(self.balance), wf.mean(self.z) / tokens)
        count = wf.sum(weights.astype(self.z.dtype), [d for d in weights.dims if d not in self.z.dims])
        groups, total = wf.sum((count > 0).astype(count.dtype)), wf.sum(count)
        balance = wf.sum(self.balance) / wf.maximum(groups, 1)
        return RouterLosses(balance, wf.sum(self.z) / wf.where(total > 0, total, 1))


class Routing(NamedTuple):
    """The experts of each token and their gates, best first, over a dim `pick`."""

    experts: Tensor
    gates: Tensor


class MixtureOfExperts(Module):
    """Feed-forward blocks, of which each token is processed by the `top` best.

    Args:
      d_model: the dim of x.
      d_ff: the wide dim of each expert.
      experts: the dim of the experts.
      top: how many experts process a token. With 1 the gate is the router's probability (Switch); with more,
        the gates of the chosen experts are normalized to a sum of 1 (GShard).
      capacity: the capacity factor. Each expert takes ceil(capacity * tokens * top / experts) tokens of a
        group.
      activation: a name of `ACTIVATIONS`.
      group: the dim of x whose elements are groups.
      bias: whether the experts' projections have biases.

    >>> import jax
    >>> from weft import nn
    >>> d_model, d_ff, experts = wf.dims("d_model=8 d_ff=16 experts=4")
    >>> layer = nn.init(nn.MixtureOfExperts(d_model, d_ff, experts), jax.random.key(0))
    >>> y, losses = layer(wf.ones("batch=2 length=6 d_model=8"))
    >>> y.dims, losses.balance.dims
    ((batch=2, length=6, d_model=8), ())
    """

    router: Linear
    feed: FeedForward
    d_model: wf.Dim = eqx.field(static=True)
    experts: wf.Dim = eqx.field(static=True)
    choices: wf.Dim = eqx.field(static=True)
    top: int = eqx.field(static=True)
    capacity: float = eqx.field(static=True)
    group: str = eqx.field(static=True)

    def __init__(
        self,
        d_model: DimLike,
        d_ff: DimLike,
        experts: DimLike,
        *,
        top: int = 1,
        capacity: float = 1.25,
        activation: str = "relu",
        group: DimLike = "batch",
        bias: bool = False,
    ):
        d_model, experts = as_dim(d_model), as_dim(experts)
        if not 1 <= top <= experts.size:
            raise ShapeError(
                f"a token is routed to the top {top} of {experts}",
                rule="a token is routed to at least one expert, and to each at most once",
                hint=f"choose top from 1 to {experts.size}",
            ).located("MixtureOfExperts")
        if not capacity > 0:
            raise ShapeError(
                f"the capacity is {capacity}",
                rule="the capacity factor is positive; 1 gives each expert an equal share of the tokens",
                hint="1.25 is usual for training",
            ).located("MixtureOfExperts")
        self.d_model, self.experts, self.choices = d_model, experts, experts.rename("choices")
        self.top, self.capacity, self.group = top, capacity, dim_name(group)
        self.router = Linear([d_model], [self.choices])
        self.feed = stack(FeedForward(d_model, d_ff, activation, bias=bias), experts)

    def __call__(
        self,
        x: Tensor,
        dropout: Callable[[Tensor], Tensor] = lambda h: h,
        dropless: bool = False,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, RouterLosses]:
        """The experts' outputs for the tokens of x, and the router's losses.

        Args:
          x: hidden states over the group's dim, `d_model`, and any other dims, which make up its tokens.
          dropout: applied to the hidden features of the experts.
          dropless: whether no token is dropped, however many choose the same expert. For decoding: every
            expert then processes every token.
          weights: over dims of tokens. Tokens of weight 0 are padding: they take no capacity and result in 0.
            The losses weight tokens accordingly.
        """
        group, rest = self._tokens(x)
        if weights is not None:
            weights = wf.broadcast_to(weights.astype(_router_dtype(x)), [group, *rest])
        y, losses = self.by_group(x, dropout, dropless, weights)
        return y, losses.mean(math.prod(d.size for d in rest), weights)

    def by_group(
        self,
        x: Tensor,
        dropout: Callable[[Tensor], Tensor] = lambda h: h,
        dropless: bool = False,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, GroupLosses]:
        """The same, with the losses of each group: for batches whose groups are processed one by one."""
        group, rest = self._tokens(x)
        tokens = rest[0] if len(rest) == 1 else wf.Dim("tokens", math.prod(d.size for d in rest))

        def flat(t: Tensor, *last: wf.Dim) -> Tensor:
            t = wf.transpose(t, [group, *rest, *last])
            return t if len(rest) == 1 else wf.reshape(t, [group, tokens, *last])

        rows = flat(x, self.d_model)
        if weights is not None:
            weights = flat(wf.broadcast_to(weights.astype(_router_dtype(x)), [group, *rest]))
        routes, losses = self.route(rows, weights)
        if dropless:
            y = self._all_experts(rows, routes, dropout)
        else:
            y = self._dispatch(rows, routes, weights, dropout)
        y = y if len(rest) == 1 else wf.reshape(y, [group, *rest, self.d_model])
        return wf.transpose(y, x.dims), losses

    def expert_capacity(self, tokens: int) -> int:
        """How many tokens of a group each expert takes, at most all of them."""
        return min(tokens, math.ceil(self.capacity * tokens * self.top / self.experts.size))

    def route(self, x: Tensor, weights: Tensor | None = None) -> tuple[Routing, GroupLosses]:
        """The routing of the tokens of x [group, tokens, d_model], and the losses, in float32."""
        group, tokens, _ = x.dims
        logits = self.router(x.astype(_router_dtype(x)))
        probabilities = wf.softmax(logits, self.choices)
        gates, chosen = wf.top_k(probabilities, self.choices, wf.Dim("pick", self.top))
        if weights is not None:
            gates = gates * (weights > 0)
        first = wf.one_hot(chosen["pick", 0], self.choices, probabilities.dtype)
        z = wf.square(wf.logsumexp(logits, self.choices))
        if weights is None:
            used, expected = wf.mean(first, tokens), wf.mean(probabilities, tokens)
        else:
            count = wf.sum(weights, tokens)
            divisor = wf.where(count > 0, count, 1)
            pair = first, probabilities
            used, expected = (wf.einsum(t, weights, out=[group, self.choices]) / divisor for t in pair)
            z = z * weights
        losses = GroupLosses(wf.sum(used * expected, self.choices) * self.experts.size, wf.sum(z, tokens))
        if self.top > 1:
            total = wf.sum(gates, "pick")
            gates = gates / wf.where(total > 0, total, 1)
        return Routing(chosen, gates), losses

    def _dispatch(
        self, x: Tensor, routes: Routing, weights: Tensor | None, dropout: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Send tokens to their experts, up to the capacity, and combine the outputs by the gates."""
        group, tokens, d_model = x.dims
        capacity = wf.Dim("capacity", self.expert_capacity(tokens.size))
        slots = wf.Dim("slots", self.experts.size * capacity.size)
        slot = self._slots(routes.experts, tokens, capacity, weights)
        # The token in each slot, counted from 1 so that 0 means an empty slot.
        empty = wf.zeros([group, slots], jnp.int32)
        token_ids = wf.scatter_add(empty, slot, wf.arange(tokens) + 1, slots) - 1
        sent = wf.split(wf.take(x, token_ids, tokens, fill=0), slots, [self.choices, capacity])
        sent = wf.transpose(sent, [self.choices, group, capacity, d_model])
        back = self._from_experts(self.feed(self._to_experts(sent), dropout), group)
        # An einsum of one operand requests the slices, so the all-to-all happens before dims are merged.
        back = wf.einsum(back, out=[group, self.choices, capacity, d_model])
        mine = wf.take(wf.merge(back, [self.choices, capacity], slots), slot, slots, fill=0)
        return wf.einsum(mine, routes.gates.astype(x.dtype), out=x.dims)

    def _slots(self, chosen: Tensor, tokens: wf.Dim, capacity: wf.Dim, weights: Tensor | None) -> Tensor:
        """The slot of each token for each of its choices; -1 if the expert is full."""
        requests = wf.one_hot(chosen, self.choices, jnp.int32)
        if weights is not None:
            requests = requests * (weights > 0).astype(jnp.int32)
        earlier = wf.cumsum(requests, tokens, exclusive=True)
        preferred = wf.cumsum(wf.sum(requests, tokens), "pick", exclusive=True)
        rank = wf.sum((earlier + preferred) * requests, self.choices)
        fits = rank < capacity.size
        if weights is not None:
            fits = fits & (weights > 0)
        return wf.where(fits, chosen * capacity.size + rank, -1)

    def _all_experts(self, x: Tensor, routes: Routing, dropout: Callable[[Tensor], Tensor]) -> Tensor:
        """The outputs of all experts for all tokens, weighted by the gates: 0 for experts not chosen."""
        group, tokens, d_model = x.dims
        requests = wf.one_hot(routes.experts, self.choices, routes.gates.dtype)
        gates = wf.einsum(requests, routes.gates, out=[self.choices, group, tokens]).astype(x.dtype)
        gates = self._to_experts(gates)
        inside = gates.dims[1]
        copies = wf.broadcast_to(x.rename(**{group.name: inside.name}), [*gates.dims, d_model])
        out = self.feed(copies, dropout)
        y = wf.einsum(out, gates, out=[inside, tokens, d_model])
        return y.rename(**{inside.name: group.name})

    def _to_experts(self, t: Tensor) -> Tensor:
        """From [choices, group, …] to [experts, group, …]. The data moves when the result is used.

        A tensor can't have two dims on one axis. If experts and groups are, the group's dim is renamed, and
        the split moves from groups to experts: an all-to-all.
        """
        try:
            return t.rename(choices=self.experts.name)
        except LayoutError:
            return t.rename(choices=self.experts.name, **{t.dims[1].name: GROUPS_DIM})

    def _from_experts(self, t: Tensor, group: wf.Dim) -> Tensor:
        """The inverse of `_to_experts`."""
        return t.rename(**{self.experts.name: "choices", t.dims[1].name: group.name})

    def _tokens(self, x: Tensor) -> tuple[wf.Dim, list[wf.Dim]]:
        """The dim of the groups and the dims that make up their tokens."""
        check_features(x, (self.d_model,), "MixtureOfExperts")
        names = [d.name for d in x.dims]
        if self.group not in names or self.group == self.d_model.name:
            others = [name for name in names if name != self.d_model.name]
            raise DimError(
                f"there is no dim {self.group} among [{', '.join(others)}]{nearest(self.group, others)}",
                rule="experts have a fixed capacity for the tokens of each group; group= names its dim",
                hint="name one of the tokens' dims: MixtureOfExperts(…, group=…)",
            ).located("MixtureOfExperts")
        group = next(d for d in x.dims if d.name == self.group)
        return group, [d for d in x.dims if d not in (group, self.d_model)]


def _router_dtype(x: Tensor) -> jnp.dtype:
    """The dtype of routers: float32, or x's if that is wider. Close scores would tie in bfloat16."""
    return jnp.promote_types(x.dtype, jnp.float32)
