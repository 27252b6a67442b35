"""Every setting of a fine-tuning run, its help text and its bounds. The defaults are the paper's."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .prompt_tree import DEFAULT_NODE_BUDGET

# Settings that do not change the weights a run ends with: they may differ when it is resumed.
_FREE_ON_RESUME = {
    "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "save_epochs", "save_total_limit",
    "report_to", "disable_tqdm", "push_to_hub", "hub_model_id", "hub_private_repo",
}  # fmt: skip


def _setting(default: Any, help: str, **options: Any) -> Any:
    return field(default=default, metadata={"help": help, **options})


@dataclass
class OrionTrainingArguments:
    """Settings of [`OrionTrainer`], named as in transformers' `TrainingArguments` where that has the setting.

    Example:
        >>> OrionTrainingArguments(output_dir="orion-eurosat", target_displacement=0.05).learning_rate
        5e-06
    """

    output_dir: str = field(metadata={"help": "Folder for the adapter, the checkpoints and training_log.jsonl."})
    overwrite_output_dir: bool = _setting(False, "Start afresh in a folder that holds an earlier run.")
    resume_from_checkpoint: str | None = _setting(
        None,
        "Continue a run: from the newest checkpoint of output_dir (no value), or from the folder named.",
        nargs="?",
        const="latest",
    )

    class_text: Literal["template_mean", "template", "name"] = _setting(
        "template_mean",
        "Text whose embedding is x_i: the unit mean over the training templates, one template drawn for each "
        "class and step, or the bare class name (the paper's literal f(k_i)). V is always the mean.",
    )
    orthogonality_weight: float = _setting(2.0, "Lambda of eq. 2 in the first epoch.")
    orthogonality_growth: float = _setting(1.15, "Lambda is multiplied by this after every epoch.")
    normalize_by_classes: bool = _setting(
        False, "Ours: fidelity / K and orthogonality / K^2, so that one lambda means the same for any K."
    )
    exact_gram: bool = _setting(
        False,
        "One step an epoch over all classes at once, in the memory of one pack of prompts, instead of a step "
        "for each batch of classes.",
    )

    learning_rate: float = _setting(5e-6, "Of AdamW, on the LoRA weights alone.")
    weight_decay: float = _setting(0.01, "Of AdamW.")
    num_train_epochs: int = _setting(20, "Times every class is seen.")
    per_device_train_batch_size: int = _setting(
        64,
        "Distinct classes a step and process (K if there are fewer); the Gram matrix is over all of them.",
    )
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = _setting(
        "constant", "Learning rate after the warm-up: as it is, or down to 0 along a cosine or a line."
    )
    warmup_steps: int = _setting(0, "Steps over which the learning rate rises from 0.")
    target_displacement: float | None = _setting(
        None,
        "Stop when the mean of ||x_i - v_i|| reaches this: one number that means the same for any K, lambda "
        "and learning rate. Needs class_text template_mean, where it starts at 0.",
    )
    seed: int = _setting(42, "Of the LoRA initialisation, the order of classes, drawn templates and dropout.")

    lora_rank: int = _setting(8, "Rank of the update of each projection matrix.")
    lora_alpha: float | None = _setting(None, "LoRA scale is alpha / rank; the rank itself if not given.")
    lora_dropout: float = _setting(0.0, "Dropout on the input of each LoRA update.")

    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = _setting(
        "auto", "auto: what accelerate is configured for, else fp16 on CUDA and fp32 on CPU."
    )
    node_budget: int = _setting(DEFAULT_NODE_BUDGET, "Largest prefix tree run at once; lower it to save memory.")
    gradient_checkpointing: bool = _setting(False, "Recompute activations in the backward pass to save memory.")

    save_epochs: int = _setting(5, "Save a checkpoint every so many epochs, and on SIGTERM or SIGINT; 0: only then.")
    save_total_limit: int = _setting(2, "Checkpoints kept, the newest ones.")
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = _setting(
        "none", "Tracker of accelerate; training_log.jsonl is written in any case."
    )
    disable_tqdm: bool = _setting(False, "No progress bar.")

    push_to_hub: bool = _setting(False, "Push the adapter when training is done, with the token you are logged in by.")
    hub_model_id: str | None = _setting(
        None,
        "Repository to push to, such as org/orion-eurosat; of several tasks each goes to org/orion-<task>.",
    )
    hub_private_repo: bool = _setting(False, "Make the repository private if it is created.")

    def __post_init__(self) -> None:
        at_least_one = (
            "num_train_epochs", "per_device_train_batch_size", "lora_rank", "node_budget", "save_total_limit",
        )  # fmt: skip
        not_negative = ("orthogonality_weight", "weight_decay", "warmup_steps", "save_epochs", "seed")
        positive = ("orthogonality_growth", "learning_rate", "target_displacement", "lora_alpha")
        for name, choices in setting_choices().items():
            self._require(name, getattr(self, name) in choices, f"one of {', '.join(choices)}")
        for name in at_least_one:
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in not_negative:
            self._require(name, 0 <= getattr(self, name) < math.inf, "0 or more")
        for name in positive:
            value = getattr(self, name)
            self._require(name, value is None or 0 < value < math.inf, "above 0")
        self._require("lora_dropout", 0 <= self.lora_dropout < 1, "from 0 to below 1")
        if self.target_displacement is not None:
            self._require("target_displacement", self.target_displacement < 2, "below 2, the diameter of the sphere")
            if self.class_text != "template_mean":
                raise ValueError(
                    f"--target_displacement needs --class_text template_mean, got {self.class_text}: "
                    "otherwise the displacement does not start at 0."
                )
        if self.exact_gram and self.lora_dropout > 0:
            raise ValueError(
                "--exact_gram encodes every prompt twice and --lora_dropout would make them differ: use 0."
            )
        if self.overwrite_output_dir and self.resume_from_checkpoint:
            raise ValueError(
                "--overwrite_output_dir starts afresh, --resume_from_checkpoint continues: give one of them."
            )
        if self.push_to_hub and not self.hub_model_id:
            raise ValueError("--push_to_hub needs --hub_model_id, for example org/orion-eurosat.")

    def _require(self, name: str, valid: bool, bounds: str) -> None:
        if not valid:
            raise ValueError(f"--{name} must be {bounds}, got {getattr(self, name)}.")

    def settings(self) -> dict[str, Any]:
        """What decides the weights a run ends with: shown by a card, and the same when a run is resumed."""
        return {name: value for name, value in asdict(self).items() if name not in _FREE_ON_RESUME}

    def orthogonality_weight_at(self, epoch: int) -> float:
        """Lambda of an epoch, counted from 0: ``weight * growth^epoch`` (2.0 to 28.5 over the paper's 20)."""
        return self.orthogonality_weight * self.orthogonality_growth**epoch

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """Learning rate of a step, counted from 0; a function of the step, so there is no state to save."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / (self.warmup_steps + 1)
        progress = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        factor = {
            "constant": 1.0,
            "linear": 1 - progress,
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
        }[self.lr_scheduler_type]
        return self.learning_rate * factor


def setting_choices() -> dict[str, tuple[str, ...]]:
    """The settings that are one of a few words, and these words.

    Example:
        >>> setting_choices()["class_text"]
        ('template_mean', 'template', 'name')
    """
    hints = get_type_hints(OrionTrainingArguments)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
