"""CLAP and its relatives: few-shot linear probes that start from the text prototypes.

Every adapter here scores an image feature x against a class c by a cosine, s = 100 the frozen scale of CLIP::

    logit(x, c) = s <x / |x|, w_c / |w_c|>

and trains by SGD with momentum on the mean cross-entropy. They differ in what is learnt:

    ZeroShotLinearProbe   w, from the text prototypes t (not normalised: the published prototype is the plain mean
                          of the template embeddings)
    CLAP                  w, from t, with the penalty (1/K) sum_c lambda_c |w_c - t_c|^2
    LinearProbe           w, from random numbers
    TaskRes               r, from 0, in w = t + alpha r
    CLIPAdapter           a two-layer map A of the image feature, ratio A(x) + (1 - ratio) x; w = t stays

ORION enters as `prototypes`: they initialise the probe and they are what CLAP's penalty pulls back to.

The published protocol keeps the features of 20 augmentation passes over the N support images, and an epoch visits
about N of these 20 N, drawn anew. Give such features as ``(20, N, d)``. There is no model selection: the last epoch
is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ._inputs import check_range
from .estimator import (
    Estimator,
    check_counts,
    check_order,
    epoch_learning_rates,
    generator,
    query_features,
    support_set,
)

PAPER = "Silva-Rodriguez et al., A Closer Look at the Few-Shot Adaptation of Large Vision-Language Models, CVPR 2024"
INPUTS = "few-shot"
_CONSTRAINT_WORDS = {"l2", "cosine", "constant", "corrected", "balanced", "adaptative"}
_CHUNK = 4096  # rows of a large feature matrix scored at a time, so that (pool, K) logits are never held at once


def cosine_logits(features: Tensor, weights: Tensor, logit_scale: float = 100.0) -> Tensor:
    """``s <x / |x|, w / |w|>``: ``(B, d)``, ``(K, d)`` -> ``(B, K)``.

    Example:
        >>> cosine_logits(torch.tensor([[3.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 5.0]]), 10.0)
        tensor([[10.,  0.]])
    """
    return logit_scale * F.normalize(features, dim=1) @ F.normalize(weights, dim=1).T


def class_multipliers(
    features: Tensor, labels: Tensor, prototypes: Tensor, logit_scale: float = 100.0, constraint: str = "l2"
) -> Tensor:
    """CLAP's weight of each class: ``lambda_c = mean_{i: y_i = c} softmax(logits_i)_c`` of the zero-shot classifier.

    A class that zero-shot CLIP already knows is held tightly. A class without support vectors gets 1: nothing is known
    that could move it.

    Args:
        features: ``(P, d)`` support vectors, all augmentations.
        labels: ``(P,)``.
        prototypes: ``(K, d)``.
        constraint: words joined by ``-``, see [`CLAP`]; ``constant``, ``corrected`` and ``balanced`` change the result.

    Returns:
        ``(K,)``.
    """
    words = _constraint_words(constraint)
    num_classes = len(prototypes)
    if "balanced" in words:
        return prototypes.new_ones(num_classes)
    own = torch.cat(
        [
            cosine_logits(rows, prototypes, logit_scale).softmax(dim=1).gather(1, chunk[:, None])[:, 0]
            for rows, chunk in zip(features.split(_CHUNK), labels.split(_CHUNK), strict=True)
        ]
    )
    count = torch.bincount(labels, minlength=num_classes)
    total = own.new_zeros(num_classes).index_add_(0, labels, own)
    multipliers = torch.where(count > 0, total / count.clamp(min=1), 1.0)
    if "corrected" in words:
        multipliers = multipliers * (num_classes / multipliers.sum())
    return multipliers.mean().expand(num_classes).clone() if "constant" in words else multipliers


def zero_shot_penalty(weights: Tensor, prototypes: Tensor, multipliers: Tensor, constraint: str = "l2") -> Tensor:
    """CLAP's pull towards the prototypes: ``(1/K) sum_c lambda_c |w_c - t_c|^2``, or with ``1 - cos(w_c, t_c)``.

    Args:
        weights: w, ``(K, d)``, not normalised.
        prototypes: t, ``(K, d)``, not normalised.
        multipliers: lambda, ``(K,)``.
        constraint: contains ``l2`` or ``cosine``.
    """
    if "cosine" in _constraint_words(constraint):
        return (multipliers * (1 - F.cosine_similarity(weights, prototypes, dim=1))).mean()
    return (multipliers * (weights - prototypes).square().sum(dim=1)).mean()


class _Head(Protocol):
    """What one adapter learns; `fit` below drives it."""

    def step(self, features: Tensor, labels: Tensor, lr: float) -> Tensor:
        """One SGD step on raw features ``(B, d)``, which it may overwrite; returns the loss before it."""

    def end_epoch(self) -> None:
        """Called after the last batch of an epoch."""

    def fitted(self) -> dict[str, Tensor]:
        """Attributes of the fitted estimator."""


class _CosineAdapter(Estimator):
    """The training loop of all adapters.

    Args:
        lr: base learning rate of the cosine schedule.
        momentum: of SGD.
        weight_decay: L2 added to the gradient.
        epochs: length of the schedule and of the training.
        batch_size: vectors a step.
        batches_per_epoch: ``None``: ``max(1, N // batch_size)``, N the un-augmented images.
        warmup_epochs: epochs at `warmup_lr` before the cosine.
        warmup_lr: see there.
        logit_scale: s, frozen.
        random_state: seed of initial values and batches.
    """

    def __init__(
        self,
        *,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        epochs: int = 300,
        batch_size: int = 256,
        batches_per_epoch: int | None = None,
        warmup_epochs: int = 1,
        warmup_lr: float = 1e-5,
        logit_scale: float = 100.0,
        random_state: int | None = 0,
    ):
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.epochs = epochs
        self.batch_size = batch_size
        self.batches_per_epoch = batches_per_epoch
        self.warmup_epochs = warmup_epochs
        self.warmup_lr = warmup_lr
        self.logit_scale = logit_scale
        self.random_state = random_state

    @torch.no_grad()
    def fit(
        self,
        features: Tensor,
        labels: Tensor,
        prototypes: Tensor,
        *,
        shuffle: Tensor | None = None,
        initial: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Learn from a support set.

        Args:
            features: ``(N, d)`` image features, or ``(E, N, d)`` of E augmentation passes; not necessarily normalised.
            labels: ``(N,)`` class indices.
            prototypes: ``(K, d)`` text prototypes t, from CLIP or ORION; ``(1, K, d)`` for scikit-learn's searches,
                which would otherwise split K prototypes among the folds when there are K images.
            shuffle: ``(epochs, E N)`` order of the pool in each epoch instead of random ones, to repeat a run; with
                fewer rows than `epochs` the training stops after them.
            initial: starting values of learnt tensors by name instead of the usual ones.

        Returns:
            self, with ``loss_per_step_`` and ``lr_per_step_`` besides what was learnt.
        """
        self._check_options()
        features, labels, prototypes = support_set(features, labels, prototypes)
        passes, images, _ = features.shape
        pool, pool_labels = features.flatten(0, 1), labels.repeat(passes)
        shuffle = check_order("shuffle", shuffle, len(pool))
        batches = self.batches_per_epoch or max(1, images // self.batch_size)
        rng = generator(self.random_state)
        given = dict(initial or {})
        head = self._head(pool, pool_labels, prototypes, rng, given)
        if given:
            raise ValueError(f"initial names {sorted(given)}, which {type(self).__name__} does not learn.")
        rates = epoch_learning_rates(self.epochs, self.lr, self.warmup_epochs, self.warmup_lr)
        losses, lr_per_step = [], []
        # Room for a batch, taken once: asking the system for fresh pages takes longer than filling them.
        rows = pool.new_empty(min(self.batch_size, len(pool)), pool.shape[1])
        for epoch in range(self.epochs if shuffle is None else min(self.epochs, len(shuffle))):
            order = torch.randperm(len(pool), generator=rng) if shuffle is None else shuffle[epoch]
            for batch in order[: batches * self.batch_size].to(pool.device).split(int(self.batch_size)):
                torch.index_select(pool, 0, batch, out=rows[: len(batch)])
                losses.append(head.step(rows[: len(batch)], pool_labels[batch], rates[epoch]))
                lr_per_step.append(rates[epoch])
            head.end_epoch()
        self._set_fitted(
            **head.fitted(),
            loss_per_step_=torch.stack(losses).double(),
            lr_per_step_=torch.tensor(lr_per_step, dtype=torch.float64),
        )
        return self

    @torch.no_grad()
    def decision_function(self, features: Tensor) -> Tensor:
        """Logits ``(B, K)`` of image features ``(B, d)``."""
        self._check_fitted()
        return cosine_logits(query_features(features, self.weights_), self.weights_, self.logit_scale)

    def _head(
        self,
        pool: Tensor,
        labels: Tensor,
        prototypes: Tensor,
        rng: torch.Generator,
        initial: dict[str, Tensor],
    ) -> _Head:
        raise NotImplementedError

    def _check_options(self) -> None:
        check_counts(epochs=self.epochs, batch_size=self.batch_size)
        if self.batches_per_epoch is not None:
            check_counts(batches_per_epoch=self.batches_per_epoch)
        check_counts(0, warmup_epochs=self.warmup_epochs)
        check_range(0, lr=self.lr, warmup_lr=self.warmup_lr, momentum=self.momentum, weight_decay=self.weight_decay)
        check_range(0, above=True, logit_scale=self.logit_scale)

    def _linear_head(self, start: Tensor, **options: Any) -> _LinearHead:
        return _LinearHead(start, self.logit_scale, self.momentum, self.weight_decay, **options)

    weights_: Tensor


class ZeroShotLinearProbe(_CosineAdapter):
    """ZS-LP: a linear probe that starts at the text prototypes. Options: see the base class.

    Example:
        >>> prototypes = torch.eye(3)
        >>> probe = ZeroShotLinearProbe(epochs=5).fit(prototypes, torch.arange(3), prototypes)
        >>> probe.predict(prototypes)
        tensor([0, 1, 2])
    """

    def _head(self, pool, labels, prototypes, rng, initial):
        return self._linear_head(_initial(initial, "weights", prototypes))


class CLAP(_CosineAdapter):
    """CLAP: ZS-LP with a penalty ``(1/K) sum_c lambda_c |w_c - t_c|^2``, lambda fixed by [`class_multipliers`].

    Args:
        constraint: ``l2`` is the published method. More words, joined by ``-``, are the variants of its code:
            ``cosine`` instead of ``l2``; ``constant``, all classes get the mean multiplier; ``corrected``,
            multipliers with mean 1; ``balanced``, all ones; ``adaptative``, multipliers that grow after every epoch
            where a class moves (an augmented Lagrangian step).

    Example:
        >>> prototypes = torch.eye(3)
        >>> CLAP(epochs=5, constraint="l2-constant").fit(prototypes, torch.arange(3), prototypes).weights_.shape
        torch.Size([3, 3])
    """

    def __init__(self, *, constraint: str = "l2", **options: Any):
        super().__init__(**options)
        self.constraint = constraint

    def _head(self, pool, labels, prototypes, rng, initial):
        multipliers = class_multipliers(pool, labels, prototypes, self.logit_scale, self.constraint)
        penalty = _Penalty(prototypes, multipliers, self.constraint)
        return self._linear_head(_initial(initial, "weights", prototypes), penalty=penalty)


clap = CLAP


class LinearProbe(_CosineAdapter):
    """LP: the same cosine classifier from random weights (Kaiming normal), the text prototypes only give K."""

    def _head(self, pool, labels, prototypes, rng, initial):
        std = (2 / prototypes.shape[1]) ** 0.5
        random = torch.randn(prototypes.shape, generator=rng, dtype=torch.float64) * std
        return self._linear_head(_initial(initial, "weights", random.to(prototypes)))


class TaskRes(_CosineAdapter):
    """TaskRes (Yu et al., CVPR 2023) as the CLAP code runs it: ``w = t + alpha r``, r learnt from 0.

    Args:
        alpha: weight of the residual.
    """

    def __init__(self, *, alpha: float = 0.5, **options: Any):
        super().__init__(**options)
        self.alpha = alpha

    def _head(self, pool, labels, prototypes, rng, initial):
        start = _initial(initial, "residual", torch.zeros_like(prototypes))
        return self._linear_head(start, base=prototypes, alpha=self.alpha)


class CLIPAdapter(_CosineAdapter):
    """CLIP-Adapter (Gao et al., IJCV 2024) as the CLAP code runs it: ``x' = ratio A(x) + (1 - ratio) x``.

    ``A(x) = relu(U relu(D x))`` with D ``(d/4, d)`` and U ``(d, d/4)``, on x as it is, not normalised.

    Args:
        ratio: weight of the adapted feature.
    """

    def __init__(self, *, ratio: float = 0.2, **options: Any):
        super().__init__(**options)
        self.ratio = ratio

    def _head(self, pool, labels, prototypes, rng, initial):
        d = prototypes.shape[1]
        down = _initial(initial, "mlp_down", _uniform(d // 4, d, rng).to(prototypes))
        up = _initial(initial, "mlp_up", _uniform(d, d // 4, rng).to(prototypes))
        return _AdapterHead(down, up, prototypes, self.ratio, self.logit_scale, self.momentum, self.weight_decay)

    @torch.no_grad()
    def decision_function(self, features: Tensor) -> Tensor:
        self._check_fitted()
        features = query_features(features, self.weights_)
        adapted = _adapt(features, self.mlp_down_, self.mlp_up_, self.ratio)
        return cosine_logits(adapted, self.weights_, self.logit_scale)

    mlp_down_: Tensor
    mlp_up_: Tensor


class _Penalty:
    """CLAP's penalty and its gradient."""

    def __init__(self, prototypes: Tensor, multipliers: Tensor, constraint: str):
        self.prototypes = prototypes
        self.lengths = prototypes.norm(dim=1)
        self.multipliers = self.first_multipliers = multipliers
        self.words = _constraint_words(constraint)
        self.rho = torch.zeros_like(multipliers)
        self.room = torch.empty_like(prototypes)
        self.history: list[Tensor] = []

    def add_gradient(self, gradient: Tensor, weights: Tensor, lengths: Tensor, alpha: float) -> Tensor:
        """Add alpha times the gradient for the weights, whose ``lengths`` are known; returns the penalty."""
        pull = self.multipliers / len(weights)
        if "cosine" in self.words:
            along = 1 / (lengths * self.lengths)
            cosine = (weights * self.prototypes).sum(dim=1) * along
            gradient.addcmul_(weights, (pull * cosine / lengths**2)[:, None], value=alpha)
            gradient.addcmul_(self.prototypes, (pull * along)[:, None], value=-alpha)
            return (pull * (1 - cosine)).sum()
        penalty = (pull * self._squared_distance(weights)).sum()
        gradient.addcmul_(self.room, pull[:, None], value=2 * alpha)
        return penalty

    def end_epoch(self, weights: Tensor) -> None:
        if "adaptative" not in self.words:
            return
        moved = self._squared_distance(weights)
        self.multipliers = (self.multipliers + self.rho * moved).clamp(min=0)
        self.rho = moved
        self.history.append(self.multipliers)

    def fitted(self) -> dict[str, Tensor]:
        after = {"multipliers_after_epoch_": torch.stack(self.history)} if self.history else {}
        return {"multipliers_": self.first_multipliers, **after}

    def _squared_distance(self, weights: Tensor) -> Tensor:
        """``|w_c - t_c|^2``; the differences are left in the room."""
        return torch.sub(weights, self.prototypes, out=self.room).norm(dim=1).square_()


class _LinearHead:
    """SGD on theta in ``w = base + alpha theta`` (base 0 and alpha 1 for the probes) with the gradient written out.

    With ``c_ic`` the cosines and ``e_ic = s (p_ic - y_ic) / B``::

        dL/dw_c = (sum_i e_ic x_i - w_c / |w_c| sum_i e_ic c_ic) / |w_c|

    so a step is two matrix products: the logits, and ``e^T x`` straight into the momentum buffer. Neither the
    normalised weights nor the gradient of the features is ever formed, and all large arrays are used again.
    """

    def __init__(
        self,
        start: Tensor,
        logit_scale: float,
        momentum: float,
        weight_decay: float,
        base: Tensor | None = None,
        alpha: float = 1.0,
        penalty: _Penalty | None = None,
    ):
        self.theta = start.clone()
        self.buffer = torch.zeros_like(start)
        self.logit_scale, self.momentum, self.weight_decay = logit_scale, momentum, weight_decay
        self.base, self.alpha, self.penalty = base, alpha, penalty
        self.room = start.new_empty(2, len(start), 0)  # for logits and errors

    def weights(self) -> Tensor:
        return self.theta if self.base is None else self.base + self.alpha * self.theta

    def step(self, features: Tensor, labels: Tensor, lr: float) -> Tensor:
        batch = len(features)
        if self.room.shape[2] != batch:
            self.room = features.new_empty(2, len(self.theta), batch)
        F.normalize(features, dim=1, out=features)
        weights = self.weights()
        lengths = weights.norm(dim=1)
        # Classes are rows, (K, B): the faster way round for both products.
        logits = torch.mm(weights, features.T, out=self.room[0]).mul_((self.logit_scale / lengths)[:, None])
        # The softmax written out: its parts give the loss too, and along this dimension it is faster so.
        largest = logits.amax(dim=0)
        errors = torch.sub(logits, largest, out=self.room[1]).exp_()
        total = errors.sum(dim=0)
        columns = torch.arange(batch, device=labels.device)
        loss = (largest - logits[labels, columns] + total.log()).mean()
        errors.div_(total)[labels, columns] -= 1
        along = logits.mul_(errors).sum(dim=1).div_(batch * lengths**2)
        errors.mul_((self.logit_scale / (batch * lengths))[:, None])
        self.buffer.addmm_(errors, features, beta=self.momentum, alpha=self.alpha)
        self.buffer.addcmul_(weights, along[:, None], value=-self.alpha)
        if self.penalty is not None:
            loss += self.penalty.add_gradient(self.buffer, weights, lengths, self.alpha)
        if self.weight_decay:
            self.buffer.add_(self.theta, alpha=self.weight_decay)
        self.theta.add_(self.buffer, alpha=-lr)
        return loss

    def end_epoch(self) -> None:
        if self.penalty is not None:
            self.penalty.end_epoch(self.weights())

    def fitted(self) -> dict[str, Tensor]:
        residual = {} if self.base is None else {"residual_": self.theta}
        return {"weights_": self.weights(), **residual, **(self.penalty.fitted() if self.penalty else {})}


class _AdapterHead:
    """SGD on the two matrices of CLIP-Adapter, by automatic differentiation."""

    def __init__(
        self,
        down: Tensor,
        up: Tensor,
        prototypes: Tensor,
        ratio: float,
        logit_scale: float,
        momentum: float,
        weight_decay: float,
    ):
        self.maps = [down.clone(), up.clone()]
        self.prototypes, self.ratio, self.logit_scale = prototypes, ratio, logit_scale
        self.optimizer = torch.optim.SGD(self.maps, lr=0.0, momentum=momentum, weight_decay=weight_decay)

    @torch.enable_grad()
    def step(self, features: Tensor, labels: Tensor, lr: float) -> Tensor:
        for matrix in self.maps:
            matrix.requires_grad_()
        adapted = _adapt(features, self.maps[0], self.maps[1], self.ratio)
        loss = F.cross_entropy(cosine_logits(adapted, self.prototypes, self.logit_scale), labels)
        for matrix, gradient in zip(self.maps, torch.autograd.grad(loss, self.maps), strict=True):
            matrix.grad = gradient
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        return loss.detach()

    def end_epoch(self) -> None:
        pass

    def fitted(self) -> dict[str, Tensor]:
        down, up = (matrix.detach() for matrix in self.maps)
        return {"weights_": self.prototypes.clone(), "mlp_down_": down, "mlp_up_": up}


def _adapt(features: Tensor, down: Tensor, up: Tensor, ratio: float) -> Tensor:
    return ratio * torch.relu(torch.relu(features @ down.T) @ up.T) + (1 - ratio) * features


def _uniform(rows: int, columns: int, rng: torch.Generator) -> Tensor:
    """The usual start of a linear layer: uniform in +-1/sqrt(fan in)."""
    return (2 * torch.rand(rows, columns, generator=rng, dtype=torch.float64) - 1) / columns**0.5


def _initial(given: dict[str, Tensor], name: str, default: Tensor) -> Tensor:
    value = torch.as_tensor(given.pop(name, default))
    if value.shape != default.shape:
        raise ValueError(f"initial[{name!r}] must be {tuple(default.shape)}, got {tuple(value.shape)}.")
    return value.to(default)


def _constraint_words(constraint: str) -> set[str]:
    words = set(constraint.replace("_", "-").split("-"))
    if not words <= _CONSTRAINT_WORDS or len(words & {"l2", "cosine"}) != 1:
        raise ValueError(
            f"constraint {constraint!r} is not known: write l2 or cosine, then any of constant, corrected, balanced, "
            "adaptative, joined by '-'."
        )
    return words
