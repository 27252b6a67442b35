"""Fine-tuning: class names in, LoRA weights out (eq. 2), on one CPU, one GPU or many.

    trainer = OrionTrainer(model, OrionTask.from_name("eurosat"), OrionTrainingArguments("out/orion-eurosat"))
    result = trainer.train()
    model.save_pretrained("out/orion-eurosat")

What the paper leaves open, and what is done here. It writes x_i = f(k_i) with k_i the class name, says that
three templates are used to fine-tune, and evaluates with one; so ``class_text`` chooses between the mean over
the templates (default), one of them drawn at each step, and the bare name, while V is always the mean, eq. 1.
With ``class_prompts`` sentences about each class take the place of the templates, in V and in the class text.
It does not say whether the Gram matrix of eq. 2 is over the batch or over all classes: it is over the batch
of distinct classes of all processes together, or over all K with ``exact_gram``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers.utils import logging

from .checkpoint import (
    checkpoints,
    clear_run,
    load_checkpoint,
    pack_optimizer,
    remove_checkpoint,
    save_checkpoint,
    unpack_optimizer,
)
from .class_batches import ClassBatches, mixed_seed
from .class_prompts import ClassPrompts, class_prompt_prototypes, sentence_prototypes, tokenize_sentences
from .geometry import GeometryReport, displacement, off_diagonal_cosines, prototype_geometry
from .launch import on_cpu, start_accelerator
from .loss import OrionLoss, orthonormality_gradient, orthonormality_loss
from .modeling_orion import OrionCLIPTextModel
from .prompt_tree import PromptPack, build_packs, encode_packs
from .prototypes import mean_prototypes
from .tasks import OrionTask
from .training_args import OrionTrainingArguments
from .training_log import LOG_NAME

if TYPE_CHECKING:
    from .labelled import LabelledFeatures

logger = logging.get_logger(__name__)

_ADVICE = (
    "Try a lower --learning_rate or --orthogonality_weight, or --mixed_precision no; the last checkpoint is as it was."
)

Stopped = Literal["finished", "target_displacement", "interrupted"]
# The loss, X of the step, and a function that adds this process's share to the gradients.
Step = tuple[OrionLoss, Tensor, Callable[[], None]]


class TrainingError(RuntimeError):
    """Training cannot go on; the message says at which step and what to try."""


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended.

    Attributes:
        stopped: "finished" all epochs, reached the "target_displacement", or was "interrupted" by a signal.
        steps: optimizer steps, those before a resume included.
        seconds: of this process's run.
        before: geometry of V.
        after: geometry of X, the mean over the training templates, whatever ``class_text`` was.
    """

    stopped: Stopped
    steps: int
    seconds: float
    before: GeometryReport
    after: GeometryReport


class SentenceBatches:
    """The batches of classes of a run whose prompts are sentences about each class, of any number.

    Args:
        batches: says which classes a step has.
        prompts: a sentence or more of every class; those too long are cut as CLIP does.
        tokenizer, config: of the text encoder.
        node_budget: of a prefix tree.
    """

    def __init__(self, batches: ClassBatches, prompts: ClassPrompts, tokenizer: Any, config: Any, node_budget: int):
        self.steps_per_epoch, self.of_epoch = batches.steps_per_epoch, batches.of_epoch
        limit = config.max_position_embeddings
        self._token_ids = [tokenize_sentences(tokenizer, own, limit).token_ids for own in prompts.sentences]
        self._node_budget = node_budget
        self._kept: dict[tuple[int, ...], list[PromptPack]] = {}

    def packs(self, classes: Tensor, step: int) -> list[PromptPack]:
        """Prefix trees of the sentences of some classes, class by class; kept when an epoch is one step."""
        key = tuple(classes.tolist())
        if key in self._kept:
            return self._kept[key]
        packs = build_packs(self._sentences(key), self._node_budget)
        if self.steps_per_epoch == 1:
            self._kept[key] = packs
        return packs

    def anchor_packs(self) -> list[PromptPack]:
        """Prefix trees of all sentences, class by class."""
        return build_packs(self._sentences(range(len(self._token_ids))), self._node_budget)

    def class_index(self, classes: Tensor) -> Tensor:
        """For each sentence of these classes, the position of its class among them."""
        counts = torch.tensor([len(self._token_ids[c]) for c in classes.tolist()])
        return torch.arange(len(counts)).repeat_interleave(counts)

    def count_tokens(self, classes: Tensor) -> int:
        """Tokens of the sentences of a step, from start to end of text."""
        return sum(map(len, self._sentences(classes.tolist())))

    def _sentences(self, classes: Sequence[int]) -> list[list[int]]:
        return [ids for c in classes for ids in self._token_ids[c]]


def sentences_fingerprint(prompts: ClassPrompts) -> str:
    """Tells apart sentences that may have been read from files of the same name."""
    digest = hashlib.sha256(json.dumps([prompts.class_names, prompts.sentences]).encode()).hexdigest()
    return f"{sum(map(len, prompts.sentences))} sentences, sha256 {digest[:32]}"


class OrionTrainer:
    """Trains the LoRA weights of a text encoder on the class names of a task.

    Args:
        model: a CLIP text encoder without LoRA; it is given one, and is trained in place.
        task: class names and templates.
        args: the settings.
        accelerator: made from ``args`` if None; share one between several runs of a launch.
        class_prompts: sentences about each class: V and x_i are the unit means over them, whatever the templates.
        validation: images whose zero-shot accuracy is logged before the first and after every epoch; the training
            does not depend on them.

    Attributes:
        anchors: V, ``(K, d)``, from the encoder before training.
        prototypes: X, ``(K, d)``, from the same texts after training; give it to ``save_pretrained``.

    Example:
        >>> trainer = OrionTrainer(model, task, OrionTrainingArguments("out"))  # doctest: +SKIP
        >>> trainer.train().after.mean_displacement  # doctest: +SKIP
        0.0031
    """

    def __init__(
        self,
        model: OrionCLIPTextModel,
        task: OrionTask,
        args: OrionTrainingArguments,
        accelerator: Accelerator | None = None,
        class_prompts: ClassPrompts | None = None,
        validation: LabelledFeatures | None = None,
    ):
        self.accelerator = build_accelerator(args) if accelerator is None else accelerator
        if self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            raise ValueError(
                "FSDP and DeepSpeed shard what needs no sharding: a CLIP text encoder is below 1 GB and "
                "under 5 % of it is trained. Use training/configs/accelerate_multi_gpu.yaml."
            )
        if model.has_lora:
            raise ValueError("The model has a LoRA adapter already: give the trainer the base model.")
        task.check_context(model.tokenizer, model.config.max_position_embeddings)
        if class_prompts is not None:
            if class_prompts.class_names != task.class_names:
                raise ValueError(f"class_prompts is about other classes than those of task {task.name}.")
            class_prompts.require_all()
            if args.class_text != "template_mean":
                raise ValueError(f"--class_text {args.class_text} does not go with --class_prompts: leave it out.")

        if validation is not None and validation.features.shape[1] != model.config.projection_dim:
            raise ValueError(
                f"validation features are {validation.features.shape[1]} wide and the text encoder's are "
                f"{model.config.projection_dim}: take both from the same CLIP."
            )

        self.task, self.args, self.class_prompts, self.validation = task, args, class_prompts, validation
        self.output_dir = Path(args.output_dir)
        self.model = model.to(self.accelerator.device)
        self.model.task = task
        self.batches: ClassBatches | SentenceBatches = ClassBatches(
            task,
            model.tokenizer,
            model.config.eos_token_id,  # type: ignore[arg-type]
            class_text=args.class_text,
            batch_size=task.num_classes
            if args.exact_gram
            else args.per_device_train_batch_size * self.accelerator.num_processes,
            node_budget=args.node_budget,
            seed=args.seed,
        )
        if class_prompts is not None:
            self.batches = SentenceBatches(self.batches, class_prompts, model.tokenizer, model.config, args.node_budget)
        self.anchors = self.prototypes = self._encode_anchors()
        self._displacements = torch.zeros(task.num_classes)  # of each class when it was last seen
        self.step = 0

        set_seed(args.seed)
        model.add_lora(args.lora_rank, args.lora_alpha, args.lora_dropout)
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._names, self._parameters = zip(
            *((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad),
            strict=True,
        )
        self.optimizer = self.accelerator.prepare_optimizer(
            torch.optim.AdamW(self._parameters, lr=args.learning_rate, weight_decay=args.weight_decay)
        )

    # The loop

    def train(self) -> TrainingResult:
        """Run to the last epoch, the target displacement or a signal; resume first if the settings say so."""
        args, accelerator, steps_per_epoch = self.args, self.accelerator, self.batches.steps_per_epoch
        total_steps = args.num_train_epochs * steps_per_epoch
        self._open_output_dir()
        # Tensorboard takes no None.
        settings = {name: "" if value is None else value for name, value in args.settings().items()}
        accelerator.init_trackers(f"orion-{self.task.name}", config=settings)
        progress = tqdm(
            total=total_steps,
            initial=self.step,
            desc=self.task.name,
            unit="step",
            disable=args.disable_tqdm or not accelerator.is_main_process,
        )
        stopped: Stopped = "finished"
        start, saved_step = time.perf_counter(), self.step
        with self._signals() as signalled, _explained_memory_errors(args), progress:
            if self.validation is not None and self.step == 0:
                self._log(self._validate(self.validation))
            while self.step < total_steps:
                record = self.training_step()
                if record is None:
                    stopped = "target_displacement"
                    break
                self._log(record)
                progress.set_postfix(loss=f"{record['loss']:.4g}", moved=f"{record['displacement']:.4f}")
                progress.update()

                epochs, into_epoch = divmod(self.step, steps_per_epoch)
                if self.validation is not None and not into_epoch:
                    self._log(self._validate(self.validation))
                due = not into_epoch and args.save_epochs and epochs % args.save_epochs == 0
                interrupted = self._any_process(bool(signalled))
                if interrupted or due or self.step == total_steps:
                    self._save_checkpoint()
                    saved_step = self.step
                if interrupted:
                    stopped = "interrupted"
                    break
        if stopped == "target_displacement" and saved_step < self.step:
            self._save_checkpoint()
        return self._finish(stopped, time.perf_counter() - start)

    def training_step(self) -> dict[str, float] | None:
        """One step of AdamW, and what is logged of it; None if the target displacement is reached already."""
        args, start = self.args, time.perf_counter()
        epoch, batch = divmod(self.step, self.batches.steps_per_epoch)
        classes = self.batches.of_epoch(epoch)[batch]
        weight = args.orthogonality_weight_at(epoch)
        learning_rate = args.learning_rate_at(self.step, args.num_train_epochs * self.batches.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        # Dropout depends on the seed, the step and the process alone: see checkpoint.py.
        torch.manual_seed(mixed_seed(args.seed, self.step, self.accelerator.process_index))

        self.model.train()
        compute = self._exact_loss if args.exact_gram else self._batch_loss
        loss, prototypes, add_gradients = compute(classes, weight)
        if not loss.total.isfinite():
            raise TrainingError(
                f"The loss is {loss.total.item()} at step {self.step + 1} (epoch {epoch + 1}). {_ADVICE}"
            )
        self._displacements[classes] = displacement(prototypes, self.anchors[classes]).cpu()
        moved = self._displacements.mean().item()
        if args.target_displacement is not None and moved >= args.target_displacement:
            return None
        add_gradients()
        self._sum_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

        mean_cosine, max_cosine = off_diagonal_cosines(prototypes)
        return {
            "step": self.step,
            "epoch": epoch + 1,
            "loss": loss.total.item(),
            "fidelity": loss.fidelity.item(),
            "orthogonality": loss.orthogonality.item(),
            "orthogonality_weight": weight,
            "learning_rate": learning_rate,
            "mean_cosine": mean_cosine,
            "max_cosine": max_cosine,
            "displacement": moved,
            "tokens_per_second": self.batches.count_tokens(classes) / (time.perf_counter() - start),
        }

    def _finish(self, stopped: Stopped, seconds: float) -> TrainingResult:
        self.model.eval()
        prototypes = self._current_prototypes()
        if not prototypes.isfinite().all():
            raise TrainingError(f"The weights are not finite after step {self.step}. {_ADVICE}")
        result = TrainingResult(
            stopped,
            self.step,
            seconds,
            before=prototype_geometry(self.anchors),
            after=prototype_geometry(prototypes, self.anchors),
        )
        self.model.anchors, self.prototypes = self.anchors, prototypes
        training = {"method": "orion", **self.args.settings(), "steps": self.step, "stopped": stopped}
        if self.class_prompts is not None:
            training["class_prompts"] = sentences_fingerprint(self.class_prompts)
        training |= {"geometry_before": asdict(result.before), "geometry_after": asdict(result.after)}
        self.model.orion_config = replace(self.model.orion_config, training=training)
        for tracker in self.accelerator.trackers:
            tracker.finish()
        return result

    def _current_prototypes(self) -> Tensor:
        """X, ``(K, d)``, of the texts that V is of."""
        if self.class_prompts is None:
            return self.model.prototypes(self.task.templates)
        return class_prompt_prototypes(self.model, self.model.tokenizer, self.class_prompts).prototypes

    def _validate(self, images: LabelledFeatures) -> dict[str, float]:
        """Percent of the images classified rightly, by the classifier that users get, and how far X is from V."""
        self.model.eval()
        prototypes = self._current_prototypes()
        classifier = prototypes if self.class_prompts is not None else self.model.prototypes()
        return {
            "step": self.step,
            "epoch": self.step // self.batches.steps_per_epoch,
            "accuracy": 100 * images.top1(classifier),
            "displacement": displacement(prototypes, self.anchors).mean().item(),
        }

    # One step

    def _batch_loss(self, classes: Tensor, weight: float) -> Step:
        """Eq. 2 over one batch of classes, each process encoding a share of it."""
        shares = classes.tensor_split(self.accelerator.num_processes)
        share = shares[self.accelerator.process_index]
        with self.accelerator.autocast():
            packs = self.batches.packs(share, self.step) if len(share) else []
            text_embeds = encode_packs(self.model, packs) if packs else None
        prototypes = self._gather(self._prototypes_of(text_embeds, share), [len(s) for s in shares])
        loss = orthonormality_loss(prototypes, self.anchors[classes], weight, self.args.normalize_by_classes)

        def gradients() -> None:
            if text_embeds is not None:
                self.accelerator.backward(loss.total)

        return loss, prototypes.detach(), gradients

    def _exact_loss(self, classes: Tensor, weight: float) -> Step:
        """Eq. 2 over all K classes with the activations of one pack: encode, differentiate at X, encode anew.

        ``dL/dtheta = sum_i dL/dx_i dx_i/dtheta``, so once dL/dX is known the prompts can be encoded again a
        pack at a time, each pack adding its part.
        """
        shares = classes.tensor_split(self.accelerator.num_processes)
        share = shares[self.accelerator.process_index]
        packs = self.batches.packs(share, self.step) if len(share) else []
        with torch.no_grad(), self.accelerator.autocast():
            text_embeds = encode_packs(self.model, packs).float() if packs else None
        leaf = None if text_embeds is None else text_embeds.requires_grad_()
        own_prototypes = self._prototypes_of(leaf, share)
        prototypes = self._gather(own_prototypes, [len(s) for s in shares]).detach()
        loss, slope = orthonormality_gradient(prototypes, self.anchors, weight, self.args.normalize_by_classes)

        def gradients() -> None:
            if leaf is None:
                return
            (leaf_slope,) = torch.autograd.grad(own_prototypes, leaf, slope[share])
            for pack in packs:
                with self.accelerator.autocast():
                    again = encode_packs(self.model, [pack])  # in the order of the pack's rows
                self.accelerator.backward((again * leaf_slope[pack.rows.sort().values]).sum())

        return loss, prototypes, gradients

    def _prototypes_of(self, text_embeds: Tensor | None, classes: Tensor) -> Tensor:
        """Unit prototypes ``(n, d)`` from the embeddings of the prompts of n classes, in float32."""
        if text_embeds is None:  # more processes than classes in the batch
            return self.anchors[:0]
        if isinstance(self.batches, SentenceBatches):
            return sentence_prototypes(text_embeds.float(), self.batches.class_index(classes), len(classes))
        return mean_prototypes(text_embeds.float().unflatten(0, (-1, len(classes))))

    def _gather(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """The rows of all processes, with gradient through this process's own.

        Every process computes the same loss of all rows and differentiates it for its own share, so the sum
        of the LoRA gradients over the processes is the gradient of the whole batch.
        """
        if self.accelerator.num_processes == 1:
            return rows
        padded = F.pad(rows.detach(), (0, 0, 0, max(sizes) - len(rows)))
        gathered = self.accelerator.gather(padded).split(max(sizes))
        parts = [part[:size] for part, size in zip(gathered, sizes, strict=True)]
        parts[self.accelerator.process_index] = rows
        return torch.cat(parts)

    def _sum_gradients(self) -> None:
        if self.accelerator.num_processes == 1:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        summed = self.accelerator.reduce(torch.cat([gradient.flatten() for gradient in gradients]), "sum")
        for parameter, part in zip(self._parameters, summed.split([p.numel() for p in self._parameters]), strict=True):
            parameter.grad = part.view_as(parameter)

    def _any_process(self, flag: bool) -> bool:
        """Whether the flag is set anywhere: all processes must leave the loop at the same step."""
        if self.accelerator.num_processes == 1:
            return flag
        flags = torch.tensor(float(flag), device=self.accelerator.device)
        return self.accelerator.reduce(flags, "sum").item() > 0

    @torch.no_grad()
    def _encode_anchors(self) -> Tensor:
        """V, ``(K, d)``, with the encoder as it is before LoRA, in full precision."""
        self.model.eval()
        text_embeds = encode_packs(self.model, self.batches.anchor_packs())
        return self._prototypes_of(text_embeds, torch.arange(self.task.num_classes))

    # Disk

    def _open_output_dir(self) -> None:
        """Make the folder ready: refuse an earlier run, clear it, or load its checkpoint."""
        folder, wanted = self.output_dir, self.args.resume_from_checkpoint
        found = checkpoints(folder)
        if wanted:
            chosen = (found[-1] if found else None) if wanted == "latest" else Path(wanted)
            if chosen is not None and not chosen.is_dir():
                chosen = folder / wanted  # its name alone will do
            if chosen is not None and not chosen.is_dir():
                have = ", ".join(path.name for path in found) or "none"
                raise ValueError(f"{chosen}: no such checkpoint; {folder} has {have}.")
            if chosen is None:
                logger.warning(f"{folder} has no checkpoint to resume from: training starts at the beginning.")
            else:
                self._load_checkpoint(chosen)
        elif folder.is_dir() and any(folder.iterdir()) and not self.args.overwrite_output_dir:
            raise ValueError(
                f"{folder} is not empty: continue with --resume_from_checkpoint, or start afresh with "
                "--overwrite_output_dir."
            )
        self.accelerator.wait_for_everyone()  # all have looked before one of them changes the folder
        if self.accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in (*folder.glob(".saving-checkpoint-*"), *folder.glob(".removing-checkpoint-*")):
                shutil.rmtree(leftover, ignore_errors=True)
            if not wanted:
                clear_run(folder)
            for path in found:  # what this run left behind after the checkpoint chosen
                if wanted and int(path.name.removeprefix("checkpoint-")) > self.step:
                    remove_checkpoint(path)
            self._cut_log()
        self.accelerator.wait_for_everyone()

    def _cut_log(self) -> None:
        """Keep the lines of the steps done; a killed process may have left later ones, or half a line."""
        path = self.output_dir / LOG_NAME
        kept = []
        if self.step and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if record["step"] <= self.step:
                    kept.append(line + "\n")
        temporary = path.with_name(f".{LOG_NAME}.tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)

    def _log(self, record: dict[str, float]) -> None:
        self.accelerator.log(record, step=self.step)
        if self.accelerator.is_main_process:
            with open(self.output_dir / LOG_NAME, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to belong to this run."""
        return {
            **self.args.settings(),
            "class_names": list(self.task.class_names),
            "templates": list(self.task.templates),
            "class_prompts": None if self.class_prompts is None else sentences_fingerprint(self.class_prompts),
            "base_model": self.model.orion_config.base_model,
            "base_revision": self.model.orion_config.base_revision,
            "num_processes": self.accelerator.num_processes,
        }

    def _save_checkpoint(self) -> None:
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if not parameter.isfinite().all():
                raise TrainingError(f"{name} is not finite after step {self.step}. {_ADVICE}")
        if self.accelerator.is_main_process:
            tensors = {f"lora/{name}": p for name, p in zip(self._names, self._parameters, strict=True)}
            tensors |= pack_optimizer(self.optimizer, list(self._names))
            tensors |= {"anchors": self.anchors, "displacements": self._displacements}
            scaler = None if self.accelerator.scaler is None else self.accelerator.scaler.state_dict()
            numbers = {"step": self.step, "identity": self._identity(), "scaler": scaler}
            save_checkpoint(self.output_dir, self.step, tensors, numbers, keep=self.args.save_total_limit)
        self.accelerator.wait_for_everyone()

    def _load_checkpoint(self, folder: Path) -> None:
        tensors, numbers = load_checkpoint(folder)
        stored, current = numbers["identity"], self._identity()
        differences = [
            f"{key} was {_short(stored.get(key))}, is {_short(current[key])}"
            for key in current
            if stored.get(key) != current[key]
        ]
        if differences:
            raise ValueError(f"{folder} was made with other settings: {'; '.join(differences)}.")
        with torch.no_grad():
            for name, parameter in zip(self._names, self._parameters, strict=True):
                parameter.copy_(tensors[f"lora/{name}"])
        unpack_optimizer(self.optimizer, list(self._names), tensors)
        self.anchors.copy_(tensors["anchors"])
        self._displacements.copy_(tensors["displacements"])
        if numbers["scaler"] and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(numbers["scaler"])
        self.step = numbers["step"]

    @contextmanager
    def _signals(self) -> Iterator[list[int]]:
        """A list that SIGTERM and SIGINT add to, so that the step at hand is finished and saved first.

        A second signal acts as it would have without us.
        """
        received: list[int] = []
        if threading.current_thread() is not threading.main_thread():
            yield received  # only the main thread may set handlers
            return
        previous: dict[int, Any] = {}

        def remember(number: int, _frame: Any) -> None:
            received.append(number)
            signal.signal(number, previous[number])

        for number in (signal.SIGTERM, signal.SIGINT):
            previous[number] = signal.signal(number, remember)
        try:
            yield received
        finally:
            for caught, handler in previous.items():
                signal.signal(caught, handler)


def build_accelerator(args: OrionTrainingArguments) -> Accelerator:
    """The accelerator of a launch: fp16 on CUDA, fp32 on CPU, unless the settings or accelerate say else."""
    precision: str = args.mixed_precision
    if precision == "auto":
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no" if on_cpu() else "fp16")
    if precision == "fp16" and on_cpu():
        raise ValueError("fp16 does not train on a CPU: use --mixed_precision no (or bf16).")
    if args.report_to != "none" and find_spec(args.report_to) is None:
        raise ValueError(f"--report_to {args.report_to} needs `pip install {args.report_to}`.")
    accelerator = start_accelerator(
        mixed_precision=precision,
        log_with=None if args.report_to == "none" else args.report_to,
        project_dir=args.output_dir,
    )
    if "MASTER_ADDR" in os.environ and accelerator.num_processes == 1:
        logger.warning(
            "Several processes were asked for and one is running: `accelerate launch --cpu` starts more only "
            "through MPI. Use --config_file training/configs/accelerate_cpu.yaml, or torchrun."
        )
    return accelerator


@contextmanager
def _explained_memory_errors(args: OrionTrainingArguments) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU allocator raises a plain one
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise TrainingError(
            f"Out of memory: lower --node_budget (now {args.node_budget}) or --per_device_train_batch_size "
            f"(now {args.per_device_train_batch_size}), or add --gradient_checkpointing or --exact_gram."
        ) from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
