"""Mixture of experts: many feed-forward blocks, of which each token sees one or two.

A router scores the experts for each token, and the token goes to the best one (`top=1`, the Switch
Transformer) or the best two (`top=2`, GShard). Every expert has a fixed number of places for the tokens of
one *group*, by default a batch row. Tokens queue up in order, second choices behind all first ones, and who
finds no place gets nothing from that expert. Groups are data, not devices, so who finds a place does not
depend on the layout.

    tokens         [batch, length, d_model]
    router         [batch, length, choices]               `choices` are the experts, and never split with them
    sent           [experts, batch, capacity, d_model]    a look-up: which token stands in which place
    experts        [experts, batch, capacity, d_ff]
    back           [batch, slots, d_model]                `slots` are choices times capacity
    result         [batch, length, d_model]               a look-up: in which places a token stood

The two look-ups take the place of products with one-hot tensors [batch, length, experts, capacity], which
would cost `length / d_ff` times as much as the experts themselves.

`experts:axis` is all that a layout says. The exchange lies between `choices` and `experts`: where batch and
experts share an axis it is an all-to-all, since beside those experts the batch is called `groups`. A layout
that splits the batch over more axes than the experts gives the others to it:
`batch:data+expert experts:expert groups:data`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp

import weft as wf
from weft.core.errors import DimError, LayoutError, ShapeError, nearest
from weft.core.tensor import Tensor

from .feedforward import FeedForward
from .linear import Linear, check_features
from .module import Module, stack

GROUPS_DIM = "groups"  # what the group's dim is called beside experts that are on the same axis


class RouterLosses(NamedTuple):
    """What keeps a router in order, each a scalar to be added to the loss with a small factor.

    Attributes:
      balance: the number of experts times Σ_e f_e·P_e, where f_e is the share of a group's tokens whose
        first choice is e, and P_e the mean of its probability; the mean over groups. Even use gives 1.
      z: the mean over tokens of the square of logsumexp(logits).
    """

    balance: Tensor
    z: Tensor


class GroupLosses(NamedTuple):
    """What router losses are the means of, for each group: its balance, and the sum of its tokens' z."""

    balance: Tensor
    z: Tensor

    def mean(self, tokens: int, weights: Tensor | None = None) -> RouterLosses:
        """The losses of all groups.

        Args:
          tokens: of each group.
          weights: over the group's dim and the tokens'; groups without weight don't count.
        """
        if weights is None:
            return RouterLosses(wf.mean(self.balance), wf.mean(self.z) / tokens)
        count = wf.sum(weights.astype(self.z.dtype), [d for d in weights.dims if d not in self.z.dims])
        groups, total = wf.sum((count > 0).astype(count.dtype)), wf.sum(count)
        balance = wf.sum(self.balance) / wf.maximum(groups, 1)
        return RouterLosses(balance, wf.sum(self.z) / wf.where(total > 0, total, 1))


class Routing(NamedTuple):
    """Where tokens go: the numbers of the experts and their gates, best first, over a dim `pick`."""

    experts: Tensor
    gates: Tensor


class MixtureOfExperts(Module):
    """Feed-forward blocks of which each token sees the `top` best.

    Args:
      d_model: the dim of x.
      d_ff: the wide dim of each expert.
      experts: the dim of the experts.
      top: how many of them a token goes to. With 1 the gate is the router's probability (Switch); with more,
        the gates of those chosen are scaled to a sum of 1 (GShard).
      capacity: the places of each expert for one group, in even shares of its tokens:
        ceil(capacity * tokens * top / experts).
      activation: a name of `ACTIVATIONS`.
      group: the dim of x whose elements are groups.
      bias: whether the experts' maps have one.

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
        d_model: wf.Dim,
        d_ff: wf.Dim,
        experts: wf.Dim,
        *,
        top: int = 1,
        capacity: float = 1.25,
        activation: str = "relu",
        group: str = "batch",
        bias: bool = False,
    ):
        if not 1 <= top <= experts.size:
            raise ShapeError(
                f"a token is to go to the top {top} of {experts}",
                rule="a token goes to at least one expert, and to each at most once",
                hint=f"choose top from 1 to {experts.size}",
            ).located("MixtureOfExperts")
        if not capacity > 0:
            raise ShapeError(
                f"the capacity is {capacity}",
                rule="the capacity is a positive factor: 1 gives each expert an even share of the tokens",
                hint="1.25 is usual for training",
            ).located("MixtureOfExperts")
        self.d_model, self.experts, self.choices = d_model, experts, experts.rename("choices")
        self.top, self.capacity, self.group = top, capacity, group
        self.router = Linear([d_model], [self.choices])
        self.feed = stack(FeedForward(d_model, d_ff, activation, bias=bias), experts)

    def __call__(
        self,
        x: Tensor,
        drop: Callable[[Tensor], Tensor] = lambda h: h,
        exact: bool = False,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, RouterLosses]:
        """What the experts make of the tokens of x, and the router's losses.

        Args:
          x: over the group's dim, `d_model`, and any others: its tokens.
          drop: applied to what is inside the experts, as dropout.
          exact: whether every token is seen by all that it chose, however many chose the same. For
            decoding: every expert then works on every token.
          weights: over dims of tokens. Those of weight 0 are padding: they take no place and result in 0; in
            the losses each counts by its weight.
        """
        group, rest = self._tokens(x)
        if weights is not None:
            weights = wf.broadcast_to(weights.astype(_wide(x)), [group, *rest])
        y, losses = self.by_group(x, drop, exact, weights)
        return y, losses.mean(math.prod(d.size for d in rest), weights)

    def by_group(
        self,
        x: Tensor,
        drop: Callable[[Tensor], Tensor] = lambda h: h,
        exact: bool = False,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, GroupLosses]:
        """The same, with what each group adds to the losses: the groups of a batch may come one by one."""
        group, rest = self._tokens(x)
        tokens = rest[0] if len(rest) == 1 else wf.Dim("tokens", math.prod(d.size for d in rest))

        def flat(t: Tensor, *last: wf.Dim) -> Tensor:
            t = wf.transpose(t, [group, *rest, *last])
            return t if len(rest) == 1 else wf.reshape(t, [group, tokens, *last])

        rows = flat(x, self.d_model)
        if weights is not None:
            weights = flat(wf.broadcast_to(weights.astype(_wide(x)), [group, *rest]))
        routes, losses = self.route(rows, weights)
        y = self._everywhere(rows, routes, drop) if exact else self._sent(rows, routes, weights, drop)
        y = y if len(rest) == 1 else wf.reshape(y, [group, *rest, self.d_model])
        return wf.transpose(y, x.dims), losses

    def places(self, tokens: int) -> int:
        """How many of a group's tokens each expert has room for; more than all of them can't come."""
        return min(tokens, math.ceil(self.capacity * tokens * self.top / self.experts.size))

    def route(self, x: Tensor, weights: Tensor | None = None) -> tuple[Routing, GroupLosses]:
        """The experts that each token of x [group, tokens, d_model] chooses, and the losses; in float32."""
        group, tokens, _ = x.dims
        logits = self.router(x.astype(_wide(x)))
        shares = wf.softmax(logits, self.choices)
        gates, chosen = wf.top_k(shares, self.choices, wf.Dim("pick", self.top))
        if weights is not None:
            gates = gates * (weights > 0)
        first = wf.one_hot(chosen["pick", 0], self.choices, shares.dtype)
        size = wf.square(wf.logsumexp(logits, self.choices))
        if weights is None:
            used, meant = wf.mean(first, tokens), wf.mean(shares, tokens)
        else:
            count = wf.sum(weights, tokens)
            some = wf.where(count > 0, count, 1)
            used, meant = (wf.einsum(t, weights, out=[group, self.choices]) / some for t in (first, shares))
            size = size * weights
        losses = GroupLosses(wf.sum(used * meant, self.choices) * self.experts.size, wf.sum(size, tokens))
        if self.top > 1:
            total = wf.sum(gates, "pick")
            gates = gates / wf.where(total > 0, total, 1)
        return Routing(chosen, gates), losses

    def _sent(self, x: Tensor, routes: Routing, weights: Tensor | None, drop: Any) -> Tensor:
        """The experts' work on the tokens that find a place, weighted by the gates."""
        group, tokens, d_model = x.dims
        capacity = wf.Dim("capacity", self.places(tokens.size))
        slots = wf.Dim("slots", self.experts.size * capacity.size)
        slot = self._queue(routes.experts, tokens, capacity, weights)
        # Which token stands in each place: its number, from 1, so that 0 is left for nobody.
        nobody = wf.zeros([group, slots], jnp.int32)
        standing = wf.scatter_add(nobody, slot, wf.arange(tokens) + 1, slots) - 1
        sent = wf.split(wf.take(x, standing, tokens, fill=0), slots, [self.choices, capacity])
        sent = wf.transpose(sent, [self.choices, group, capacity, d_model])
        back = self._returned(self.feed(self._exchanged(sent), drop), group)
        # An einsum of one: it asks for the slices, and so makes the exchange before dims are merged.
        back = wf.einsum(back, out=[group, self.choices, capacity, d_model])
        mine = wf.take(wf.merge(back, [self.choices, capacity], slots), slot, slots, fill=0)
        return wf.einsum(mine, routes.gates.astype(x.dtype), out=x.dims)

    def _queue(self, chosen: Tensor, tokens: wf.Dim, capacity: wf.Dim, weights: Tensor | None) -> Tensor:
        """The place of each token for each of its choices among all slots, -1 if it finds none."""
        asks = wf.one_hot(chosen, self.choices, jnp.int32)
        if weights is not None:
            asks = asks * (weights > 0).astype(jnp.int32)
        earlier = wf.cumsum(asks, tokens, exclusive=True)
        preferred = wf.cumsum(wf.sum(asks, tokens), "pick", exclusive=True)
        place = wf.sum((earlier + preferred) * asks, self.choices)
        found = place < capacity.size
        if weights is not None:
            found = found & (weights > 0)
        return wf.where(found, chosen * capacity.size + place, -1)

    def _everywhere(self, x: Tensor, routes: Routing, drop: Any) -> Tensor:
        """All experts' work on all tokens, weighted by the gates, which are 0 where one was not chosen."""
        group, tokens, d_model = x.dims
        asks = wf.one_hot(routes.experts, self.choices, routes.gates.dtype)
        gates = wf.einsum(asks, routes.gates, out=[self.choices, group, tokens]).astype(x.dtype)
        gates = self._exchanged(gates)
        inside = gates.dims[1]
        copies = wf.broadcast_to(x.rename(**{group.name: inside.name}), [*gates.dims, d_model])
        out = self.feed(copies, drop)
        y = wf.einsum(out, gates, out=[inside, tokens, d_model])
        return y.rename(**{inside.name: group.name})

    def _exchanged(self, t: Tensor) -> Tensor:
        """From [choices, group, …] to [experts, group, …]; the data moves where it is used.

        A tensor can't have two dims on one axis. If these are, the group's gets another name here, and what
        was split by groups becomes split by experts.
        """
        try:
            return t.rename(choices=self.experts.name)
        except LayoutError:
            return t.rename(choices=self.experts.name, **{t.dims[1].name: GROUPS_DIM})

    def _returned(self, t: Tensor, group: wf.Dim) -> Tensor:
        """Back from what `_exchanged` made."""
        return t.rename(**{self.experts.name: "choices", t.dims[1].name: group.name})

    def _tokens(self, x: Tensor) -> tuple[wf.Dim, list[wf.Dim]]:
        """The group's dim and the others that make up its tokens."""
        check_features(x, (self.d_model,), "MixtureOfExperts")
        names = [d.name for d in x.dims]
        if self.group not in names or self.group == self.d_model.name:
            others = [name for name in names if name != self.d_model.name]
            raise DimError(
                f"there is no dim {self.group} among [{', '.join(others)}]{nearest(self.group, others)}",
                rule="experts have so many places for the tokens of each group, and group= names their dim",
                hint="name one of the tokens' dims: MixtureOfExperts(…, group=…)",
            ).located("MixtureOfExperts")
        group = next(d for d in x.dims if d.name == self.group)
        return group, [d for d in x.dims if d not in (group, self.d_model)]


def _wide(x: Tensor) -> Any:
    """The type that routers compute in: float32, or x's if that is wider."""
    return jnp.promote_types(x.dtype, jnp.float32)
