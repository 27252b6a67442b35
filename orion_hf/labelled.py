"""Image features of a task with their labels, and how many of them a set of prototypes gets right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .features import ImageEncoder, image_features
from .images import task_images
from .tasks import OrionTask


@dataclass(frozen=True)
class LabelledFeatures:
    """Unit features ``(N, d)`` of images and their classes ``(N,)``, both on the CPU.

    Example:
        >>> images = LabelledFeatures(torch.eye(3), torch.tensor([0, 1, 0]))
        >>> images.top1(torch.eye(3))
        0.6666666666666666
    """

    features: Tensor
    labels: Tensor

    @classmethod
    def of_task(
        cls,
        encoder: ImageEncoder,
        task: OrionTask,
        split: str = "test",
        *,
        source: str | None = None,
        seed: int = 0,
        images_per_class: int | None = None,
    ) -> LabelledFeatures:
        """Features of a task's images, from the cache if they are there; arguments as for `task_images`."""
        dataset = task_images(task, split, source=source, seed=seed, images_per_class=images_per_class)
        found = image_features(encoder, dataset, split=split)
        return cls(found.features.float().cpu(), torch.tensor(dataset["label"][:])[found.rows])

    def __len__(self) -> int:
        return len(self.labels)

    def predictions(self, prototypes: Tensor) -> Tensor:
        """``argmax_k f_i . t_k``, ``(N,)``."""
        return (self.features @ prototypes.float().cpu().T).argmax(dim=1)

    def top1(self, prototypes: Tensor) -> float:
        """The share of images whose nearest prototype is that of their class."""
        return (self.predictions(prototypes) == self.labels).double().mean().item()
