"""Sentences about each class in place of templates: in fine-tuning, in evaluation and in the pipeline."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_clip_folder import TASK as PETS
from tiny_clip_folder import save_tiny_clip, train_a_little
from torch.nn.functional import normalize
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, pipeline

from orion_hf import OrionZeroShotImageClassificationPipeline, cli
from orion_hf.class_prompts import class_prompt_prototypes, match_class_prompts
from orion_hf.features import ImageEncoder, image_features
from orion_hf.images import task_images
from orion_hf.labelled import LabelledFeatures
from orion_hf.modeling_orion import OrionCLIPTextModel
from orion_hf.tasks import OrionTask
from orion_hf.trainer import OrionTrainer
from orion_hf.training_args import OrionTrainingArguments

# One, two and three sentences; another spelling; one sentence longer than 77 tokens (a letter is a token).
SENTENCES = {
    "Cat": ["A cat purrs."],
    "dog": ["A dog barks.", "A dog, of all animals, is the one that " + "follows you from room to room and " * 4],
    "sea_lion": ["It swims.", "It barks too.", "It has whiskers."],
    "walrus": ["It has tusks."],
}
QUICK = ["--num_train_epochs", "3", "--learning_rate", "1e-3", "--disable_tqdm"]
LAND = OrionTask.from_name("tiny-land")
LAND_SENTENCES = {
    name: [f"a photo of {name}.", f"{name} seen from above."][: 1 + k % 2] for k, name in enumerate(LAND.class_names)
}


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    return str(save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny"))


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "pets.json"
    path.write_text(json.dumps(SENTENCES))
    return str(path)


@pytest.fixture(scope="module")
def names_file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("names") / "pets.txt"
    path.write_text("\n".join(PETS.class_names))
    return str(path)


def stock_prototypes(folder: str, state: dict | None = None) -> torch.Tensor:
    """The specification in stock transformers: truncated and padded, one class after the other."""
    model = CLIPTextModelWithProjection.from_pretrained(folder)
    if state is not None:
        model.load_state_dict(state)
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    rows = []
    for own in list(SENTENCES.values())[:3]:
        inputs = tokenizer(own, padding="max_length", truncation=True, max_length=77, return_tensors="pt")
        with torch.no_grad():
            rows.append(normalize(model(**inputs).text_embeds, dim=-1).mean(dim=0))
    return normalize(torch.stack(rows), dim=-1)


def finetune(clip: str, names_file: str, folder: Path, *flags: str) -> int:
    options = ["--model", clip, "--class_names_file", names_file, "--output_dir", str(folder)]
    return cli.main(["finetune", *options, *QUICK, *flags])


@pytest.fixture(scope="module")
def trained(clip, names_file, prompt_file, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "pets"
    assert finetune(clip, names_file, folder, "--class_prompts", prompt_file) == 0
    return folder


# --- finetune ---------------------------------------------------------------------------------------------


def test_v_and_x_are_of_the_sentences(clip, trained):
    saved = load_file(trained / "prototypes.safetensors")
    torch.testing.assert_close(saved["anchors"], stock_prototypes(clip), rtol=0, atol=2e-6)
    merged = OrionCLIPTextModel.from_pretrained(str(trained))._merged_state_dict()
    torch.testing.assert_close(saved["prototypes"], stock_prototypes(clip, merged), rtol=0, atol=2e-6)
    assert (saved["prototypes"] - saved["anchors"]).norm(dim=1).min() > 1e-3  # it was trained
    log = [json.loads(line) for line in (trained / "training_log.jsonl").read_text().splitlines()]
    assert log[0]["fidelity"] < 1e-8 and log[0]["displacement"] < 1e-4  # x_i starts at v_i: they are the same text
    assert log[-1]["orthogonality"] < log[0]["orthogonality"]
    training = json.loads((trained / "orion_config.json").read_text())["training"]
    assert training["class_prompts"].startswith("6 sentences, sha256 ")


def test_a_step_is_the_gradient_of_eq_2_over_the_sentences(clip, tmp_path):
    prompts = match_class_prompts(SENTENCES, PETS.class_names)
    gradients = []
    for exact_gram in (False, True):
        args = OrionTrainingArguments(str(tmp_path / "a"), exact_gram=exact_gram, disable_tqdm=True)
        model = OrionCLIPTextModel.from_pretrained(clip)
        trainer = OrionTrainer(model, PETS, args, class_prompts=prompts)
        train_a_little(model)
        compute = trainer._exact_loss if exact_gram else trainer._batch_loss
        compute(torch.arange(3), 2.0)[2]()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})
    # By hand, on the last model: V is given, X from one padded forward of each class.
    model.zero_grad()
    rows = []
    for own in prompts.sentences:
        inputs = model.tokenizer(list(own), padding="max_length", truncation=True, max_length=77, return_tensors="pt")
        rows.append(normalize(normalize(model(**inputs).text_embeds, dim=-1).mean(dim=0), dim=-1))
    x = torch.stack(rows)
    ((x - trainer.anchors).square().sum() + 2.0 * (x @ x.T - torch.eye(3)).square().sum()).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            for found in gradients:
                torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_training_free_prototypes_are_of_the_sentences(clip, names_file, prompt_file, tmp_path, capsys):
    flags = ["--class_prompts", prompt_file, "--training_free", "svd"]
    assert finetune(clip, names_file, tmp_path / "svd", *flags) == 0
    # What was cut and what was not used is said.
    assert "6 sentences for 3 classes, 1 of them cut at 77 tokens; not used: walrus" in capsys.readouterr().out
    saved = load_file(tmp_path / "svd" / "prototypes.safetensors")
    torch.testing.assert_close(saved["anchors"], stock_prototypes(clip), rtol=0, atol=2e-6)
    torch.testing.assert_close(saved["prototypes"] @ saved["prototypes"].T, torch.eye(3), rtol=0, atol=1e-5)


def test_finetune_refuses_what_it_cannot_use(clip, names_file, prompt_file, trained, tmp_path, capsys):
    part = tmp_path / "part.json"
    part.write_text(json.dumps({"dog": ["A dog."], "steller sea lion": ["It swims."], "lynx": ["It hides."]}))
    assert finetune(clip, names_file, tmp_path / "a", "--class_prompts", str(part)) == 2
    error = capsys.readouterr().err
    assert "no sentences for 2 of 3 classes: 'cat'" in error and "'sea lion' (near: 'steller sea lion')" in error

    flags = ["--class_prompts", prompt_file, "--class_text", "name"]
    assert finetune(clip, names_file, tmp_path / "b", *flags) == 2
    assert "--class_text name does not go with --class_prompts" in capsys.readouterr().err

    other = tmp_path / "other.json"
    other.write_text(json.dumps(SENTENCES | {"Cat": ["Another sentence."]}))
    flags = ["--resume_from_checkpoint", "--num_train_epochs", "3"]
    assert finetune(clip, names_file, trained, "--class_prompts", str(other), *flags) == 2
    assert "was made with other settings: class_prompts was '6 sentences" in capsys.readouterr().err


# --- evaluate ---------------------------------------------------------------------------------------------


def test_evaluate_classifies_by_the_sentences(tmp_path, capsys):
    model = OrionCLIPTextModel.from_pretrained("embedded:tiny-clip")
    model.task = LAND
    model.add_lora()
    train_a_little(model)
    model.save_pretrained(tmp_path / "orion")
    path = tmp_path / "land.json"
    path.write_text(json.dumps(LAND_SENTENCES))
    command = ["evaluate", "--model", "embedded:tiny-clip", "--task", LAND.name, "--orion", str(tmp_path / "orion")]
    command += ["--images_per_class", "5", "--output_dir", str(tmp_path / "out")]
    assert cli.main(command) == 0
    assert cli.main([*command, "--class_prompts", str(path)]) == 0
    assert "15 sentences for 10 classes, 0 of them cut" in capsys.readouterr().out

    data = json.loads((tmp_path / "out" / "results.json").read_text())
    cells = {c["prototypes"]: c for c in data["cells"] if c["protocol"].get("class_prompts") == "land.json"}
    assert cells.keys() == {"clip", "svd", "orion"}
    assert len(data["cells"]) == 4 + 3
    # Template cells and sentence cells are not compared with each other.
    entries = [e for e in data["comparisons"] if "class_prompts" in e["protocol"]]
    assert len(entries) == 2 and len(data["comparisons"]) == 5
    for entry in entries:
        difference = cells[entry["prototypes"]]["top1"] - cells["clip"]["top1"]
        assert entry["difference"] == pytest.approx(difference, abs=1e-12)

    test = task_images(LAND, images_per_class=5)
    features = image_features(ImageEncoder.from_pretrained("embedded:tiny-clip"), test, progress=False).features
    prompts = match_class_prompts(LAND_SENTENCES, LAND.class_names)
    text_models = {
        "clip": OrionCLIPTextModel.from_pretrained("embedded:tiny-clip", dtype=torch.float32),
        "orion": OrionCLIPTextModel.from_pretrained(str(tmp_path / "orion"), merge=True, dtype=torch.float32),
    }
    by_hand = {}
    for kind, text_model in text_models.items():
        prototypes = class_prompt_prototypes(text_model, text_model.tokenizer, prompts).prototypes
        correct = (features @ prototypes.T).argmax(dim=1) == torch.tensor(test["label"][:])
        assert cells[kind]["top1"] == pytest.approx(correct.double().mean().item(), abs=1e-9)
        # Image by image, because both encoders may be right equally often.
        outcomes = load_file(tmp_path / "out" / "outcomes" / f"{cells[kind]['id']}.safetensors")["outcomes"]
        assert torch.equal(outcomes.bool(), correct)
        by_hand[kind] = correct
    assert not torch.equal(by_hand["clip"], by_hand["orion"])

    capsys.readouterr()
    for flags, message in {
        ("--methods", "tpt"): "tpt tunes the words around a class name: it does not go with --class_prompts",
        ("--save_to_adapter",): "leave out --class_prompts",
    }.items():
        assert cli.main([*command, "--class_prompts", str(path), *flags]) == 2
        assert message in capsys.readouterr().err


def test_few_shot_methods_start_from_the_sentences(tmp_path, capsys):
    path = tmp_path / "land.json"
    path.write_text(json.dumps(LAND_SENTENCES))
    command = ["fewshot", "--model", "embedded:tiny-clip", "--task", LAND.name, "--class_prompts", str(path)]
    command += ["--shots", "1", "--seeds", "1", "--passes", "1", "--images_per_class", "2"]
    command += ["--output_dir", str(tmp_path / "out"), "--cache_dir", str(tmp_path / "cache")]
    assert cli.main([*command, "--method", "clap", "--options", "clap.epochs=1", "clap.warmup_lr=0"]) == 0
    (cell,) = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]
    assert cell["protocol"]["class_prompts"] == "land.json"
    # With a learning rate of 0 CLAP is the zero-shot classifier of the prototypes it starts from.
    model = OrionCLIPTextModel.from_pretrained("embedded:tiny-clip", dtype=torch.float32)
    prompts = match_class_prompts(LAND_SENTENCES, LAND.class_names)
    images = LabelledFeatures.of_task(ImageEncoder.from_pretrained("embedded:tiny-clip"), LAND, images_per_class=2)
    prototypes = class_prompt_prototypes(model, model.tokenizer, prompts).prototypes
    assert cell["top1"] == pytest.approx(images.top1(prototypes), abs=1e-9)

    assert cli.main([*command, "--method", "coop"]) == 2
    assert "coop learns the words around a class name" in capsys.readouterr().err


# --- pipeline ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*77 tokens")
def test_the_pipeline_embeds_labels_by_their_sentences(clip, prompt_file):
    expected = stock_prototypes(clip)
    image = task_images(LAND, images_per_class=1)[0]["image"]
    classify = pipeline("orion-zero-shot-image-classification", model=clip, class_prompts=prompt_file, device="cpu")
    torch.testing.assert_close(classify.label_embeds(PETS.class_names), expected, rtol=0, atol=2e-6)

    found = {entry["label"]: entry["score"] for entry in classify(image, candidate_labels=list(PETS.class_names))}
    pixel_values = classify.image_processor(images=[image], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        image_embeds = normalize(classify.model.get_image_features(pixel_values=pixel_values).pooler_output, dim=-1)
        logits = classify.model.logit_scale.exp() * image_embeds @ expected.T
    assert [found[name] for name in PETS.class_names] == pytest.approx(logits.softmax(-1)[0].tolist(), abs=1e-5)

    given = OrionZeroShotImageClassificationPipeline(clip, class_prompts=SENTENCES, orion_task=PETS, device="cpu")
    assert given(image) == classify(image, candidate_labels=list(PETS.class_names))
    with pytest.raises(ValueError, match="no sentences for 1 of 2 classes: 'lynx'"):
        classify(image, candidate_labels=["dog", "lynx"])
    with pytest.raises(ValueError, match="hypothesis_template does not go with class_prompts"):
        classify(image, candidate_labels=["dog", "walrus"], hypothesis_template="a {}")
    with pytest.raises(ValueError, match="class_prompts: 'dog' must have a list of at least one sentence"):
        OrionZeroShotImageClassificationPipeline(clip, class_prompts={"dog": "A dog."}, device="cpu")


@pytest.mark.filterwarnings("ignore:.*77 tokens")
def test_the_pipeline_takes_sentences_at_the_call(clip, prompt_file):
    image = task_images(LAND, images_per_class=1)[0]["image"]
    labels = list(PETS.class_names)
    classify = OrionZeroShotImageClassificationPipeline(clip, device="cpu", candidate_labels=labels)
    made_with = OrionZeroShotImageClassificationPipeline(clip, device="cpu", class_prompts=SENTENCES)
    plain = classify(image)
    expected = made_with(image, candidate_labels=labels)
    assert expected != plain
    for given in (prompt_file, Path(prompt_file), SENTENCES):
        assert classify(image, class_prompts=given) == expected
        assert [entry["label"] for entry in classify([image, image], class_prompts=given, batch_size=2)[1]] == [
            entry["label"] for entry in expected
        ]
    assert classify(image) == plain, "the sentences of a call are not kept"
    # The call's sentences win over the constructor's, and are told apart by what they say.
    others = {name: [f"{name} in the rain."] for name in labels}
    assert made_with(image, candidate_labels=labels, class_prompts=others) == classify(image, class_prompts=others)
    assert classify(image, class_prompts=others) != expected
    with pytest.raises(ValueError, match="hypothesis_template does not go with class_prompts"):
        classify(image, class_prompts=SENTENCES, hypothesis_template="a {}")
    with pytest.raises(ValueError, match="tokenizer_kwargs do not go with class_prompts"):
        classify(image, class_prompts=SENTENCES, tokenizer_kwargs={"truncation": True})
    with pytest.raises(ValueError, match="class_prompts: 'dog' must have a list"):
        classify(image, class_prompts={"dog": []})
    with pytest.raises(ValueError, match=r"class_prompts must be .* not list"):
        classify(image, class_prompts=["A dog."])


def test_the_pipeline_says_once_how_many_sentences_are_cut(clip, prompt_file):
    image = task_images(LAND, images_per_class=1)[0]["image"]
    classify = OrionZeroShotImageClassificationPipeline(clip, device="cpu", candidate_labels=list(PETS.class_names))
    with pytest.warns(UserWarning, match=r"pets\.json: 1 of 6 sentences are longer than 77 tokens") as caught:
        for _ in range(3):
            classify([image, image], class_prompts=prompt_file)
    assert sum("77 tokens" in str(warning.message) for warning in caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        classify(image, class_prompts={name: ["Short."] for name in PETS.class_names})
