"""Learn from a few labelled images, starting from CLIP's and from ORION's prototypes.

orion-hf fewshot --model openai/clip-vit-base-patch16 --orion org/orion-eurosat --task eurosat \\
    --method clap coop tip_adapter --shots 1 2 4 8 16 --seeds 5
orion-hf fewshot --model embedded:tiny-clip --task tiny-land --orion out/demo --shots 1 4       # no network

A seed draws the images of every class, their crops and the order of training; CLIP and ORION get the same ones, so
differences are paired. The prototypes are where CLAP and its relatives start and the text half of Tip-Adapter; CoOp
learns its context under CLIP's or ORION's text encoder, which stays as it is. The test split is the same for all.

Options are the published ones, for some tasks of their own (Tip-Adapter's alpha, CoOp's epochs on ImageNet). In two
things all methods are alike where their own code differs: prototypes are of the task's evaluation template, names
without underscores (CLAP's code averages eight templates on ImageNet), and a class with fewer images than shots is
taken whole (Tip-Adapter's code repeats some).

The draws are kept in `splits/` and used again, everything measured in `results.json` (layout: `orion_hf/results.py`;
a cell has one value, its accuracy, and intervals are over seeds). The same command again measures only what is missing.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from huggingface_hub import cached_assets_path
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import normalize
from tqdm import tqdm

from ..class_prompts import ClassPrompts, class_prompt_prototypes
from ..evaluation import LabelledImages, TunedText, assign_options, describe_cell
from ..features import ImageEncoder, ImageFeatures, digest_of, image_features, weights_digest
from ..files import write_whole
from ..images import task_images
from ..kshot import COOP_CROP_AREA, SHOTS, TIP_ADAPTER_CROP_AREA, KShotSplit, augmented_features, k_shot_split
from ..launch import start_accelerator
from ..layout import aligned_table
from ..measuring import MeasuringArguments, measure_each, read_adapters, read_tasks, versions
from ..methods.clap import CLAP, CLIPAdapter, LinearProbe, TaskRes, ZeroShotLinearProbe
from ..methods.coop import CoOp
from ..methods.estimator import Estimator
from ..methods.tip_adapter import TipAdapter, TipAdapterF
from ..modeling_orion import OrionCLIPTextModel
from ..options import parse_dataclasses
from ..published import published_options
from ..results import Cell, Results, comparisons, pooled_summary
from ..tasks import OrionTask
from .finetune import read_class_prompts

METHODS: dict[str, type[Estimator]] = {
    "clap": CLAP,
    "coop": CoOp,
    "tip_adapter": TipAdapter,
    "tip_adapter_f": TipAdapterF,
    "zs_lp": ZeroShotLinearProbe,
    "lp": LinearProbe,
    "taskres": TaskRes,
    "clip_adapter": CLIPAdapter,
}
# Given by the command; and `affinity`, whose other value needs test features that are not of unit length.
_NO_OPTIONS = {"text_model", "tokenizer", "class_names", "random_state", "affinity"}


@dataclass
class FewshotArguments(MeasuringArguments):
    """What to learn from how many images."""

    method: list[str] = field(
        default_factory=lambda: ["clap", "coop", "tip_adapter"], metadata={"help": " ".join(METHODS)}
    )
    options: list[str] = field(
        default_factory=list,
        metadata={"help": "Options of methods: clap.epochs=100 coop.n_ctx=4 tip_adapter.selection=validation"},
    )
    shots: list[int] = field(default_factory=lambda: list(SHOTS), metadata={"help": "Labelled images of each class."})
    seeds: int = field(default=3, metadata={"help": "Number of draws of these images: seeds 1, 2, ..."})
    passes: int | None = field(
        default=None, metadata={"help": "Augmented copies of each image. Default: 10 (tip_adapter), 20 (others)."}
    )
    train_split: str = field(default="train", metadata={"help": "Split the labelled images are drawn from."})
    output_dir: str = field(default="out/fewshot", metadata={"help": "Folder of results.json and splits/."})


def main(argv: list[str] | None = None) -> int:
    """Parse, load both towers, measure task by task, print the table. 0: all done, 1: a task failed."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    read_methods(args.method, args.options, logit_scale=1.0)  # a misspelt one should not cost the loading of a model
    adapters = read_adapters(args.orion or ())
    tasks = read_tasks(args, adapters)
    accelerator = start_accelerator()
    encoder = ImageEncoder.from_pretrained(args.model, args.revision)
    base = OrionCLIPTextModel.from_pretrained(args.model, revision=args.revision, dtype=torch.float32)
    command = shlex.join(["orion-hf", "fewshot", *argv])
    few_shot = FewShot(
        args,
        encoder,
        base.to(accelerator.device).requires_grad_(False).eval(),
        read_methods(args.method, args.options, encoder.logit_scale),
        Results(args.output_dir),
        {"command": command, "versions": versions(), "settings": asdict(args)},
        accelerator,
    )
    cells, failed = measure_each(tasks, lambda task: few_shot.run_task(task, adapters.get(task.name)), accelerator)
    if cells:
        accelerator.print(f"{args.model}, seeds 1 to {args.seeds}\n")
        accelerator.print(few_shot_table(cells, few_shot.results))
        accelerator.print("\npercent correct, mean over seeds ± 95 %; the difference is paired over seeds")
        accelerator.print(f"results   {few_shot.results.path}")
    accelerator.end_training()
    return 1 if failed else 0


@dataclass(frozen=True)
class Start:
    """What a few-shot method starts from: CLIP's text, or ORION's.

    Attributes:
        text_model: the encoder under CoOp's context.
        prototypes: ``(K, d)``, text embeddings of the evaluation prompts, not normalised, as CLAP takes them; methods
            that need unit rows normalise them. With sentences about the classes, the unit means over these.
        tuned: where ORION's came from; None for CLIP.
    """

    text_model: OrionCLIPTextModel
    prototypes: Tensor
    tuned: TunedText | None = None

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        text_model: OrionCLIPTextModel,
        task: OrionTask,
        prompts: ClassPrompts | None = None,
        tuned: TunedText | None = None,
    ) -> Start:
        if prompts is not None:
            return cls(text_model, class_prompt_prototypes(text_model, text_model.tokenizer, prompts).prototypes, tuned)
        return cls(text_model, text_model.encode(task.prompts(), normalize=False), tuned)


# Its id, all that its accuracy depends on, and what it is measured with.
DescribedCell: TypeAlias = "tuple[str, Cell, Start, SupportSet]"


@dataclass
class FewShot:
    """Runs the cells of one command.

    Attributes:
        args: the flags.
        encoder, base: both towers of the model.
        methods: method -> its options.
        results: where finished cells are kept.
        run: command, versions and settings, for `results.json`.
    """

    args: FewshotArguments
    encoder: ImageEncoder
    base: OrionCLIPTextModel
    methods: Mapping[str, dict[str, Any]]
    results: Results
    run: dict[str, Any]
    accelerator: Accelerator
    _fresh: list[tuple[str, Cell, Tensor]] = field(default_factory=list)  # measured here, not told to the others yet

    @cached_property
    def _weights(self) -> str:
        return digest_of([self.encoder.weights, weights_digest(self.base.state_dict())])

    def run_task(self, task: OrionTask, adapter: str | None = None) -> list[Cell]:
        """Measure what is not in the results yet; all cells of the task come back, draw by draw."""
        args = self.args
        task.check_context(self.base.tokenizer, self.base.config.max_position_embeddings)
        prompts = read_class_prompts(args.class_prompts, task, self.base, self.accelerator)
        if prompts is not None and "coop" in self.methods:
            raise ValueError("coop learns the words around a class name: it does not go with --class_prompts")
        class_prompts = None if prompts is None else (Path(str(args.class_prompts)).name, prompts)
        starts = {"clip": Start.of(self.base, task, prompts)}
        if adapter is not None:
            tuned = TunedText.load(adapter, self.base, task)
            starts["orion"] = Start.of(tuned.model, task, prompts, tuned)
        images_of = partial(task_images, task, source=args.images)
        train = LabelledImages(images_of(args.train_split), args.train_split, self._plain_features, task.num_classes)
        test_images = images_of(args.split, images_per_class=args.images_per_class)
        test = LabelledImages(test_images, args.split, self._plain_features, task.num_classes)
        test.plain  # noqa: B018  # encoded by all processes together, before each goes its own way
        draws = [(seed, shots) for seed in range(1, args.seeds + 1) for shots in args.shots]
        processes = self.accelerator.num_processes
        found: list[str] = []
        with tqdm(total=len(draws), desc=task.name, unit="draw", disable=not self.accelerator.is_main_process) as bar:
            for first in range(0, len(draws), processes):
                at_once = draws[first : first + processes]  # one for each process
                for process, (seed, shots) in enumerate(at_once):
                    cells = self._cells_of_draw(task, starts, train, test, shots, seed, class_prompts)
                    found += [cell_id for cell_id, *_ in cells]
                    if process == self.accelerator.process_index:
                        self._measure_missing(cells, test, task)
                self._exchange()
                bar.update(len(at_once))
        return [self.results.cells[cell_id] for cell_id in found]

    def _measure_missing(self, cells: Sequence[DescribedCell], test: LabelledImages, task: OrionTask) -> None:
        for cell_id, cell, start, support in cells:
            if self.results.outcomes(cell_id) is None:
                measured, accuracy = self._measure(cell, start, support, test, task)
                if self.accelerator.num_processes == 1:
                    self.results.add(cell_id, measured, accuracy, self.run)
                else:
                    self._fresh.append((cell_id, measured, accuracy))

    def _exchange(self) -> None:
        """Give every process what the others have measured; one of them writes it."""
        if self.accelerator.num_processes > 1:
            for cell_id, measured, accuracy in gather_object(self._fresh):
                self.results.add(cell_id, measured, accuracy, self.run, write=self.accelerator.is_main_process)
            self._fresh.clear()

    def _options(self, method: str, task: OrionTask) -> dict[str, Any]:
        """Published options of a method, those of this task included, and over them what the user assigned."""
        assigned = {assignment.partition("=")[0] for assignment in self.args.options}
        own = published_options(method, task.name)
        return self.methods[method] | {key: value for key, value in own.items() if f"{method}.{key}" not in assigned}

    def _cells_of_draw(
        self,
        task: OrionTask,
        starts: Mapping[str, Start],
        train: LabelledImages,
        test: LabelledImages,
        shots: int,
        seed: int,
        class_prompts: tuple[str, ClassPrompts] | None,
    ) -> list[DescribedCell]:
        """All methods and prototypes on one support set."""
        split = self._split(task, support_labels(train), shots, seed)
        support = SupportSet(self, train, split)
        found: list[DescribedCell] = []
        for method in self.methods:
            options = self._options(method, task)
            for kind, start in starts.items():
                cell = describe_cell(
                    task,
                    self.encoder,
                    self._weights,
                    method,
                    options,
                    kind,
                    start.tuned,
                    {"kind": "full", "shots": shots, "passes": support.passes(method)},
                    seed,
                    class_prompts,
                ) | {
                    "dataset": {
                        "source": self.args.source(task),
                        "split": self.args.split,
                        "fingerprint": test.dataset._fingerprint,
                    },
                    "support": {
                        "split": self.args.train_split,
                        "fingerprint": train.dataset._fingerprint,
                        "draw": digest_of([split.train, split.validation]),
                        "area": list(crop_area(method)),
                    },
                }
                found.append((digest_of(cell), cell, start, support))
        return found

    def _measure(
        self, cell: Cell, start: Start, support: SupportSet, test: LabelledImages, task: OrionTask
    ) -> tuple[Cell, Tensor]:
        """The cell with what was measured, and its accuracy ``(1,)``."""
        device = self.accelerator.device
        test_set = (test.plain.features.to(device), test.labels.to(device))
        features = support.features(cell["method"]).to(device)
        begin = time.perf_counter()
        estimator = build_estimator(cell, start.text_model, task)
        selection = cell["options"].get("selection", "none")
        labelled: dict[str, Any] = {}
        if selection == "published_on_test":
            labelled["test"] = test_set
        # Where the published code selects on the test set, it searches beta and alpha there for ImageNet alone.
        if selection == "validation" or (selection == "published_on_test" and task.name != "imagenet"):
            labelled["validation"] = support.validation()
        fit: Any = estimator.fit  # type: ignore[attr-defined]
        fit(features, support.labels.to(device), start.prototypes, **labelled)
        measured = {
            "unit": "support set",
            "n_tasks": 1,
            "num_images": len(test.labels),
            "unreadable": list(test.plain.unreadable),
            "seconds": round(time.perf_counter() - begin, 3),
        }
        return cell | measured, torch.tensor([estimator.score(*test_set)], dtype=torch.float64)

    def _split(self, task: OrionTask, labels: Tensor, shots: int, seed: int) -> KShotSplit:
        """The draw in the output folder, or a new one that is put there."""
        path = Path(self.args.output_dir) / "splits" / f"{task.name}-{shots}-{seed}.json"
        if path.is_file():
            split = KShotSplit.from_json(path)
            try:
                split.check(labels)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            return split
        split = k_shot_split(labels, shots, seed, validation_from_train=True)
        if self.accelerator.is_main_process:
            split.save_json(path)
        return split

    def _plain_features(self, dataset: Dataset, split: str, views: None = None) -> ImageFeatures:
        return image_features(
            self.encoder,
            dataset,
            split=split,
            batch_size=self.args.image_batch_size,
            num_workers=self.args.num_workers,
            cache_dir=self.args.cache_dir,
            progress=False,
        )


class SupportSet:
    """The labelled images of one draw; features are computed when a cell first needs them, and kept on disk.

    Args:
        few_shot: the run it belongs to.
        train: images it was drawn from.
        split: the draw.
    """

    def __init__(self, few_shot: FewShot, train: LabelledImages, split: KShotSplit):
        self._run, self._train, self._split = few_shot, train, split
        self._kept: dict[str, Tensor] = {}

    @property
    def labels(self) -> Tensor:
        return support_labels(self._train)[self._split.train]

    def passes(self, method: str) -> int:
        """Augmented copies of each image."""
        return self._run.args.passes or (10 if method.startswith("tip_adapter") else 20)

    def features(self, method: str) -> Tensor:
        """``(passes, N, d)``, not normalised."""
        encoder, recipe = self._run.encoder, {"passes": self.passes(method), "area": crop_area(method)}
        key = {
            "dataset": self._train.dataset._fingerprint,
            "rows": self._split.train,
            "weights": encoder.weights,
            "preprocessing": encoder.processor.to_json_string(),
            "seed": self._split.seed,
            **recipe,
        }
        name = digest_of(key)
        if name not in self._kept:
            cache_dir = self._run.args.cache_dir
            folder = cached_assets_path("orion-hf", "support") if cache_dir is None else Path(cache_dir) / "support"
            self._kept[name] = self._load_or_encode(folder / f"{name}.safetensors", recipe)
        return self._kept[name]

    def validation(self) -> tuple[Tensor, Tensor]:
        """Unit features and labels of up to four images a class that are not in the support set."""
        rows = self._split.validation
        if not rows:
            raise ValueError("selection=validation: all labelled images are in the support set; lower --shots")
        device, encoder = self._run.accelerator.device, self._run.encoder
        encoder.clip.to(device)
        features = torch.cat(
            [raw_features(encoder, self._images(part)) for part in batched(rows, self._run.args.image_batch_size)]
        )
        return normalize(features, dim=-1).to(device), support_labels(self._train)[rows].to(device)

    def _images(self, rows: Sequence[int]) -> list:
        """Pictures of the training set, in RGB."""
        try:
            return [image.convert("RGB") for image in self._train.dataset.select(rows)["image"][:]]
        except (OSError, SyntaxError) as error:  # what PIL raises of damaged files
            raise ValueError(
                f"a training image drawn with seed {self._split.seed} cannot be read ({error}): take it out of the "
                "dataset, and remove the folder splits/ of --output_dir"
            ) from error

    def _load_or_encode(self, path: Path, recipe: dict[str, Any]) -> Tensor:
        try:
            return load_file(path)["features"]
        except (FileNotFoundError, SafetensorError, KeyError):
            pass
        encoder = self._run.encoder
        encoder.clip.to(self._run.accelerator.device)
        features = augmented_features(
            self._images(self._split.train),
            partial(raw_features, encoder),
            **recipe,
            size=encoder.image_size,
            seed=self._split.seed,
            batch_size=self._run.args.image_batch_size,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda temporary: save_file({"features": features.contiguous()}, temporary))
        return features


def batched(rows: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Consecutive parts of at most ``size`` rows."""
    return (rows[start : start + size] for start in range(0, len(rows), size))


def build_estimator(cell: Cell, text_model: OrionCLIPTextModel, task: OrionTask) -> Estimator:
    """The estimator of a cell, not fitted."""
    kind, options = METHODS[cell["method"]], dict(cell["options"])
    if "random_state" in kind.__signature__.parameters:
        options["random_state"] = cell["seed"]
    if kind is CoOp:
        return CoOp(text_model, text_model.tokenizer, task.class_names, **options)
    return kind(**options)


def support_labels(images: LabelledImages) -> Tensor:
    """Class indices ``(N,)`` of all images; `LabelledImages.labels` would encode every one of them first."""
    return torch.tensor(images.dataset["label"][:])


def crop_area(method: str) -> tuple[float, float]:
    """Bounds of the share of an image that a crop covers, as published."""
    return TIP_ADAPTER_CROP_AREA if method.startswith("tip_adapter") else COOP_CROP_AREA


@torch.no_grad()
def raw_features(encoder: ImageEncoder, images: list) -> Tensor:
    """Image embeddings ``(B, d)``, not normalised: Tip-Adapter averages them as they are."""
    pixel_values = encoder.processor(images, return_tensors="pt")["pixel_values"]
    image_embeds: Any = encoder.clip.get_image_features(pixel_values=pixel_values.to(encoder.clip.device))
    return image_embeds.pooler_output.float().cpu()


def parse_arguments(argv: Sequence[str]) -> FewshotArguments:
    """Flags as a dataclass.

    Example:
        >>> parse_arguments("--model embedded:tiny-clip --task tiny-land --shots 1 4".split()).shots
        [1, 4]
    """
    description = __doc__.split("\n")[0]
    (args,) = parse_dataclasses([FewshotArguments], argv, prog="orion-hf fewshot", description=description)
    args.check_positive("seeds", "passes", "images_per_class", "image_batch_size")
    if min(args.shots) < 1 or len(set(args.shots)) < len(args.shots):
        raise ValueError(f"--shots must be different numbers from 1 up, not {args.shots}")
    if args.train_split == args.split:
        raise ValueError(f"--train_split and --split are both {args.split}: what is learnt from must not be tested on.")
    return args


def read_methods(names: Sequence[str], assignments: Sequence[str], logit_scale: float) -> dict[str, dict[str, Any]]:
    """Options of each method: the published ones, the model's own ``logit_scale``, and what the user assigns.

    Example:
        >>> read_methods(["clap"], ["clap.epochs=5"], 100.0)["clap"]["epochs"]
        5
    """
    for name in names:
        if name not in METHODS:
            raise ValueError(f"no few-shot method {name!r}: choose among {', '.join(METHODS)}")
    chosen = {
        name: {
            option.name: option.default
            for option in METHODS[name].__signature__.parameters.values()
            if option.name not in _NO_OPTIONS
        }
        | {"logit_scale": round(logit_scale, 4)}
        for name in dict.fromkeys(names)
    }
    assign_options(chosen, assignments, METHODS)
    return chosen


def few_shot_table(cells: Sequence[Cell], results: Results) -> str:
    """A Markdown table: a line for each task, method and number of shots; percent, mean over seeds ± 95 %."""
    kinds = [kind for kind in ("clip", "orion") if any(cell["prototypes"] == kind for cell in cells)]
    groups: dict[tuple[str, str, int], dict[str, list[Cell]]] = {}
    for cell in cells:
        chosen_on_test = cell["options"].get("selection") == "published_on_test"
        method = f"{cell['method']} (selected on test)" if chosen_on_test else cell["method"]
        line = groups.setdefault((cell["task"], method, cell["protocol"]["shots"]), {})
        line.setdefault(cell["prototypes"], []).append(cell)
    names = {"clip": "CLIP", "orion": "ORION"}
    rows = [["task", "method", "shots", *(names[kind] for kind in kinds)]]
    if "orion" in kinds:
        rows[0].append("difference")
    for (task, method, shots), members in sorted(groups.items()):
        row = [task, method, str(shots)]
        for kind in kinds:
            summary = pooled_summary(members.get(kind, []), results.outcomes) if kind in members else None
            row.append("-" if summary is None else _percent(summary.mean, summary.low, summary.high))
        if "orion" in kinds:
            pairs = comparisons([cell for each in members.values() for cell in each], results.outcomes)
            row += [_percent(pair["difference"], pair["low"], pair["high"], "+") for pair in pairs] or ["-"]
        rows.append(row)
    return aligned_table(rows)


def _percent(mean: float, low: float | None, high: float | None, sign: str = "") -> str:
    """``71.3 ± 0.8``; without an interval (None or NaN) of a single seed the mean alone."""
    known = low is not None and high is not None and low == low
    half = f" ± {50 * (high - low):.1f}" if known else ""  # type: ignore[operator]
    return f"{100 * mean:{sign}.1f}{half}"
