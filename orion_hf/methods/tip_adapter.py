"""Tip-Adapter: a cache of the support features beside the text classifier.

With the support features as keys F (unit rows), their one-hot labels as values L and unit prototypes W::

    logits(x) = s x W^T + alpha exp(-beta (1 - x F^T)) L

`TipAdapter` needs no training; `TipAdapterF` trains the keys. ORION enters as `prototypes`, W.

alpha and beta can be searched. The published code searches them on the whole validation split, and for ImageNet on
the test set; its Tip-Adapter-F keeps the epoch that is best on the test set. Here the default is no selection at all.
``selection="validation"`` uses the labelled images given as ``validation``, and ``selection="published_on_test"``
repeats the published behaviour: an upper bound, not a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ._inputs import check_range
from .estimator import (
    Estimator,
    check_counts,
    check_pair,
    check_rows,
    class_indices,
    generator,
    query_features,
    support_set,
    unit_rows,
)

PAPER = "Zhang et al., Tip-Adapter: Training-free Adaption of CLIP for Few-shot Classification, ECCV 2022"
INPUTS = "few-shot"
Labelled = tuple[Tensor, Tensor]
_CHUNK = 1024  # query rows scored at a time: the affinity to 16 x 1000 keys is wide

# beta, alpha before the search, and the bounds (beta, alpha) of the search.
PUBLISHED = {
    "imagenet": (1.0, 1.17, (7.0, 3.0)),
    "caltech101": (1.0, 3.0, (12.0, 5.0)),
    "dtd": (1.0, 2.0, (13.0, 13.0)),
    "eurosat": (1.0, 2.0, (12.0, 10.0)),
    "fgvc_aircraft": (1.0, 5.0, (30.0, 30.0)),
    "food101": (1.0, 1.17, (10.0, 10.0)),
    "flowers102": (1.0, 10.0, (50.0, 50.0)),
    "oxford_pets": (1.0, 1.17, (7.0, 3.0)),
    "stanford_cars": (1.0, 3.0, (20.0, 10.0)),
    "sun397": (1.0, 1.17, (12.0, 10.0)),
    "ucf101": (1.0, 3.0, (7.0, 3.0)),
}


def published_settings(dataset: str) -> dict[str, Any]:
    """The authors' options for a dataset, to be given to [`TipAdapter`] or [`TipAdapterF`].

    Example:
        >>> published_settings("dtd")
        {'beta': 1.0, 'alpha': 2.0, 'search_scale': (13.0, 13.0)}
    """
    if dataset not in PUBLISHED:
        raise ValueError(f"No published settings for {dataset!r}: choose from {sorted(PUBLISHED)}.")
    beta, alpha, scale = PUBLISHED[dataset]
    return {"beta": beta, "alpha": alpha, "search_scale": scale}


def cache_logits(features: Tensor, keys: Tensor, labels: Tensor, num_classes: int, beta: float, alpha: float) -> Tensor:
    """``alpha exp(-beta (1 - x F^T)) L``: ``(B, d)``, keys ``(N, d)`` with labels ``(N,)`` -> ``(B, K)``.

    Multiplying by the one-hot L only adds up the rows of a class, so L is never formed.

    Example:
        >>> cache_logits(torch.eye(2), torch.eye(2), torch.tensor([0, 0]), 2, beta=0.0, alpha=1.0)
        tensor([[2., 0.],
                [2., 0.]])
    """
    return alpha * _class_sums(torch.exp(beta * (keys @ features.T - 1)), labels, num_classes).T


class TipAdapter(Estimator):
    """Tip-Adapter: the cache model without training.

    Args:
        beta: sharpness of the affinity.
        alpha: weight of the cache.
        selection: ``none``, ``validation`` or ``published_on_test``: what beta and alpha are searched on.
        search_scale: upper bounds of beta and alpha, not reached.
        search_step: number of values of beta and alpha.
        affinity: ``cosine``; ``raw`` leaves the query feature un-normalised in the affinity, a departure found in the
            CLAP code and kept to compare with it.
        logit_scale: s.

    Example:
        >>> prototypes = torch.eye(3)
        >>> TipAdapter().fit(prototypes, torch.arange(3), prototypes).predict(prototypes)
        tensor([0, 1, 2])
    """

    def __init__(
        self,
        *,
        beta: float = 1.0,
        alpha: float = 1.17,
        selection: str = "none",
        search_scale: tuple[float, float] = (7.0, 3.0),
        search_step: tuple[int, int] = (200, 20),
        affinity: str = "cosine",
        logit_scale: float = 100.0,
    ):
        self.beta = beta
        self.alpha = alpha
        self.selection = selection
        self.search_scale = search_scale
        self.search_step = search_step
        self.affinity = affinity
        self.logit_scale = logit_scale

    @torch.no_grad()
    def fit(
        self,
        features: Tensor,
        labels: Tensor,
        prototypes: Tensor,
        *,
        validation: Labelled | None = None,
        test: Labelled | None = None,
    ) -> TipAdapter:
        """Build the cache, then search beta and alpha if `selection` says so.

        Args:
            features: ``(N, d)`` image features, or ``(E, N, d)`` raw ones of E augmentation passes, which are averaged.
            labels: ``(N,)`` class indices.
            prototypes: ``(K, d)`` text prototypes W; ``(1, K, d)`` for scikit-learn's searches, which would otherwise
                split K prototypes among the folds when there are K images.
            validation: labelled features for the search.
            test: labelled features, only read with ``selection="published_on_test"``, and searched on if there is no
                ``validation``, as published for ImageNet.

        Returns:
            self, with ``keys_``, ``labels_``, ``prototypes_``, ``beta_`` and ``alpha_``.
        """
        self._check_options()
        features, labels, prototypes = support_set(features, labels, prototypes)
        _, searched_on = _selection_data(self.selection, validation, test, features)
        self._build_cache(features, labels, prototypes)
        if searched_on is not None:
            self.beta_, self.alpha_ = self._search(*searched_on)
        return self

    @torch.no_grad()
    def decision_function(self, features: Tensor) -> Tensor:
        """Logits ``(B, K)`` of image features ``(B, d)``."""
        self._check_fitted()
        unit, query = self._queries(features)
        chunks = [
            self.logit_scale * x @ self.prototypes_.T
            + cache_logits(q, self.keys_, self.labels_, len(self.prototypes_), self.beta_, self.alpha_)
            for x, q in zip(unit.split(_CHUNK), query.split(_CHUNK), strict=True)
        ]
        return torch.cat(chunks)

    def _check_options(self) -> None:
        if self.affinity not in ("cosine", "raw"):
            raise ValueError(f"affinity {self.affinity!r} is not known: choose 'cosine' or 'raw'.")
        check_range(0, beta=self.beta, alpha=self.alpha)
        check_range(0, above=True, logit_scale=self.logit_scale)
        check_pair("search_scale", self.search_scale)
        check_pair("search_step", self.search_step)
        for steps in self.search_step:
            check_counts(search_step=steps)

    def _build_cache(self, features: Tensor, labels: Tensor, prototypes: Tensor) -> None:
        means = check_rows("features averaged over the passes", features.mean(dim=0))
        self._set_fitted(
            labels_=labels.clone(),
            prototypes_=unit_rows(prototypes),
            keys_=F.normalize(means, dim=1),
            beta_=float(self.beta),
            alpha_=float(self.alpha),
            selection_=self.selection,
        )

    def _queries(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Features for the text classifier and for the cache."""
        features = query_features(features, self.keys_)
        unit = unit_rows(features)
        return unit, features if self.affinity == "raw" else unit

    def _search(self, features: Tensor, labels: Tensor) -> tuple[float, float]:
        """The first pair, beta in the outer loop, with the highest accuracy.

        Accuracy only counts hits, so rows are scored in chunks; the cache is summed once a beta, not once a pair.
        """
        betas, alphas = (
            [0.1 + i * (bound - 0.1) / steps for i in range(steps)]
            for bound, steps in zip(self.search_scale, self.search_step, strict=True)
        )
        hits = torch.zeros(len(betas), len(alphas), dtype=torch.int64)
        unit, query = self._queries(features)
        for x, q, y in zip(unit.split(_CHUNK), query.split(_CHUNK), labels.split(_CHUNK), strict=True):
            text = self.logit_scale * self.prototypes_ @ x.T
            distance = self.keys_ @ q.T - 1
            for b, beta in enumerate(betas):
                cache = _class_sums(torch.exp(beta * distance), self.labels_, len(text))
                for a, alpha in enumerate(alphas):
                    hits[b, a] += int(((text + alpha * cache).argmax(dim=0) == y).sum())
        best = int(hits.flatten().argmax())
        return betas[best // len(alphas)], alphas[best % len(alphas)]

    keys_: Tensor
    labels_: Tensor
    prototypes_: Tensor
    beta_: float
    alpha_: float


tip_adapter = TipAdapter


class TipAdapterF(TipAdapter):
    """Tip-Adapter-F: the keys are trained by AdamW on the cross-entropy of the combined logits; beta, alpha stay.

    Args:
        lr: learning rate, cosine to 0 over all steps.
        epochs: 20 (the authors take 100 for EuroSAT).
        batch_size: the last, smaller batch is kept.
        weight_decay: of AdamW.
        eps: of AdamW.
        betas: of AdamW.
        random_state: seed of the batches.
    """

    def __init__(
        self,
        *,
        lr: float = 1e-3,
        epochs: int = 20,
        batch_size: int = 256,
        weight_decay: float = 0.01,
        eps: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        random_state: int | None = 0,
        **options: Any,
    ):
        super().__init__(**options)
        self.lr = lr
        self.epochs = epochs
        self.batch_size = batch_size
        self.weight_decay = weight_decay
        self.eps = eps
        self.betas = betas
        self.random_state = random_state

    @torch.no_grad()
    def fit(
        self,
        features: Tensor,
        labels: Tensor,
        prototypes: Tensor,
        *,
        validation: Labelled | None = None,
        test: Labelled | None = None,
        train_features: Tensor | None = None,
        order: Tensor | None = None,
    ) -> TipAdapterF:
        """Build the cache, train its keys, then search beta and alpha if `selection` says so.

        Args:
            features, labels, prototypes, validation, test: see [`TipAdapter.fit`].
            train_features: ``(epochs, N, d)`` newly augmented features of every epoch; default: the passes of
                ``features`` in turn.
            order: ``(epochs, N)`` order of the images in each epoch instead of random ones, to repeat a run.

        Returns:
            self, with ``loss_per_step_``, ``lr_per_step_`` and, where there is a selection, ``accuracy_per_epoch_``
            besides what TipAdapter sets.
        """
        self._check_options()
        features, labels, prototypes = support_set(features, labels, prototypes)
        chosen_on, searched_on = _selection_data(self.selection, validation, test, features)
        passes = features if train_features is None else torch.as_tensor(train_features).to(features)
        if passes.ndim != 3 or not len(passes) or passes.shape[1:] != features.shape[1:]:
            raise ValueError(f"train_features must be (epochs, {', '.join(map(str, features.shape[1:]))}).")
        check_rows("train_features", passes)
        order = None if order is None else torch.as_tensor(order)
        if order is not None and (order.ndim != 2 or len(order) < self.epochs):
            raise ValueError(f"order must have a row for each of {self.epochs} epochs, got {tuple(order.shape)}.")
        self._build_cache(features, labels, prototypes)
        self._train(passes, order, chosen_on and (lambda: self.score(*chosen_on)))
        if chosen_on is None or searched_on is None:
            return self
        initial = (self.beta_, self.alpha_)
        before = self.score(*chosen_on)
        self.beta_, self.alpha_ = self._search(*searched_on)
        # The published number is the larger of the accuracies before and after the search, both on the test set.
        if self.selection == "published_on_test" and before > self.score(*chosen_on):
            self.beta_, self.alpha_ = initial
        return self

    def _check_options(self) -> None:
        super()._check_options()
        check_counts(epochs=self.epochs, batch_size=self.batch_size)
        check_range(0, lr=self.lr, weight_decay=self.weight_decay, eps=self.eps)
        check_pair("betas", self.betas)

    def _train(self, passes: Tensor, order: Tensor | None, measure: Callable[[], float] | None) -> None:
        """AdamW on the keys; with ``measure``, the keys of the first epoch with the highest accuracy are kept."""
        images = passes.shape[1]
        steps = self.epochs * math.ceil(images / self.batch_size)
        rng = generator(self.random_state)
        keys = self.keys_.clone().requires_grad_()
        optimizer = torch.optim.AdamW(
            [keys], lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps, weight_decay=self.weight_decay
        )
        losses: list[Tensor] = []
        rates: list[float] = []
        accuracies: list[float] = []
        best_keys = self.keys_
        for epoch in range(self.epochs):
            shuffled = torch.randperm(images, generator=rng) if order is None else order[epoch]
            for batch in shuffled.to(passes.device).split(int(self.batch_size)):
                rates.append(0.5 * self.lr * (1 + math.cos(math.pi * len(rates) / steps)))
                optimizer.param_groups[0]["lr"] = rates[-1]
                raw = passes[epoch % len(passes), batch]
                x = F.normalize(raw, dim=1)
                query = raw if self.affinity == "raw" else x
                with torch.enable_grad():
                    logits = self.logit_scale * x @ self.prototypes_.T + cache_logits(
                        query, keys, self.labels_, len(self.prototypes_), self.beta_, self.alpha_
                    )
                    loss = F.cross_entropy(logits, self.labels_[batch])
                    (keys.grad,) = torch.autograd.grad(loss, keys)
                optimizer.step()
                losses.append(loss.detach())
            self.keys_ = keys.detach().clone()
            if measure is not None:
                accuracies.append(measure())
                if accuracies[-1] > max(accuracies[:-1], default=-1.0):
                    best_keys = self.keys_
        if measure is not None:
            self.keys_ = best_keys
            self.accuracy_per_epoch_ = torch.tensor(accuracies, dtype=torch.float64)
        self.loss_per_step_ = torch.stack(losses).double()
        self.lr_per_step_ = torch.tensor(rates, dtype=torch.float64)


def _class_sums(rows: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """``(N, B)`` -> ``(K, B)``: sum of the rows of each class."""
    return rows.new_zeros(num_classes, rows.shape[1]).index_add(0, labels, rows)


def _selection_data(
    selection: str, validation: Labelled | None, test: Labelled | None, like: Tensor
) -> tuple[Labelled | None, Labelled | None]:
    """The labelled data that choose the epoch, and those on which beta and alpha are searched."""
    if selection == "none":
        return None, None
    if selection == "validation":
        if validation is None:
            raise ValueError("selection='validation' needs fit(..., validation=(features, labels)).")
        validation = _labelled("validation", validation, like)
        return validation, validation
    if selection == "published_on_test":
        if test is None:
            raise ValueError("selection='published_on_test' needs fit(..., test=(features, labels)).")
        test = _labelled("test", test, like)
        return test, test if validation is None else _labelled("validation", validation, like)
    raise ValueError(f"selection {selection!r} is not known: choose 'none', 'validation' or 'published_on_test'.")


def _labelled(name: str, given: Labelled, like: Tensor) -> Labelled:
    """Labelled features that go with those of the support set; a fault is found before anything is fitted."""
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise ValueError(f"{name} must be a pair (features, labels).")
    try:
        features = query_features(given[0], like)
        return features, class_indices(given[1], len(features)).to(like.device)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
