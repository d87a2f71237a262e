"""The scripts finetune_*.py as a user runs them, and each mistake they have a paragraph for."""

import functools
import json
import math
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from finetuning import (
    PACKAGES,
    RESULTS_NAME,
    TEXT_NAMES,
    ClassificationArguments,
    DataArguments,
    ModelArguments,
    RecipeError,
    at_most,
    check_writable,
    checkpoint_to_resume,
    config_from_scratch,
    docstrings,
    encode_labels,
    find_columns,
    load_classification,
    load_files,
    load_or_train,
    pack,
    parse_arguments,
    sources,
    step_to_resume,
    train_for_classification,
    train_for_language_modeling,
)
from launching import CONFIGS, ROOT, launch_forked, run_forked
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    TrainingArguments,
)

SCRIPTS = ROOT / "scripts"
SST2 = ROOT.parent / "shared" / "data" / "sst2"
TINY_BERT = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64"
TINY_GPT = "n_embd=32,n_layer=1,n_head=2"
NO_DROPOUT = {
    "bert": "hidden_dropout_prob=0,attention_probs_dropout_prob=0",
    "gpt": "resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",
}
REVIEWS = [("a warm and funny film", "good"), ("dull from start to end", "bad"), ("the cast is a joy", "good")] * 12


def run(name: str, output: Path, *arguments: object, zero: object = 2) -> dict[str, float]:
    """Run a recipe on two ranks, and return its results."""
    script = SCRIPTS / f"finetune_{name}.py"
    done = launch_forked(script, "--zero", zero, "--output_dir", output, *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((output / RESULTS_NAME).read_text(encoding="utf-8"))


def in_configs(zero: object) -> object:
    """A file of configs/ by its path, anything else as it is."""
    return CONFIGS / zero if isinstance(zero, str) else zero


def write(path: Path, rows: list[tuple], separator: str = "\t") -> Path:
    path.write_text("\n".join(separator.join(row) for row in rows), encoding="utf-8")
    return path


# The scripts, end to end


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("zero", [pytest.param(2, marks=pytest.mark.slow), "zero3_offload_cpu.yaml"])
def test_bert_learns_reloads_and_resumes(zero, tmp_path):
    size = (
        *("--config_overrides", TINY_BERT, "--max_train_samples", 256, "--max_seq_length", 32),
        *("--disable_tqdm", "true"),
    )
    schedule = ("--warmup_steps", 0, "--learning_rate", 5e-3)
    bert = partial(run, "bert", tmp_path, *size, *schedule, zero=in_configs(zero))
    first = bert("--max_steps", 8, "--save_steps", 8)
    assert first["processes"] == 2
    assert first["train_loss"] == pytest.approx(math.log(len(PACKAGES)), rel=0.1)
    assert first["state_bytes"] > 0 and first["bytes_sent"] > 0

    resumed = bert("--max_steps", 64, "--save_steps", 64, "--resume_from_checkpoint", "true")
    assert resumed["train_loss"] < first["train_loss"]
    assert resumed["eval_accuracy"] > 1.5 / len(PACKAGES)
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 64

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert list(model.config.id2label.values()) == list(PACKAGES)
    assert tokenizer.decode(tokenizer("Cancel the task.").input_ids) == "[CLS] cancel the task.[SEP]"
    classified = run_forked(
        SCRIPTS / "classify.py", [tmp_path, "Cancel the task."], environment=os.environ, processes=1
    )
    assert classified.returncode == 0, classified.stderr
    assert re.search(rf"label: ({'|'.join(PACKAGES)}), probability: 0\.\d+", classified.stdout)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("zero", ["zero2.yaml", 3])
def test_gpt_learns_and_reloads(zero, tmp_path):
    size = ("--config_overrides", TINY_GPT, "--block_size", 32, "--max_train_samples", 256, "--max_eval_samples", 32)
    schedule = ("--warmup_steps", 0, "--learning_rate", 1e-2, "--disable_tqdm", "true")
    results = run("gpt", tmp_path, *size, *schedule, zero=in_configs(zero))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert results["perplexity"] == pytest.approx(math.exp(results["eval_loss"]))
    assert results["perplexity"] < len(tokenizer) / 2
    assert results["train_tokens_per_second"] > 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    written = model.generate(**tokenizer("import ", return_tensors="pt"), max_new_tokens=4)
    assert tokenizer.decode(written[0]).startswith("import ")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("zero", ["zero2_offload_cpu.yaml", pytest.param("zero3.yaml", marks=pytest.mark.slow)])
def test_the_plain_loop_resumes_to_the_weights_of_the_uninterrupted_run(zero, tmp_path):
    common = (
        *("--config_overrides", f"{TINY_BERT},{NO_DROPOUT['bert']}", "--max_train_samples", 96, "--max_seq_length", 32),
        *("--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2, "--num_train_epochs", 2),
        *("--num_warmup_steps", 2, "--max_grad_norm", 0.5),
    )
    # 96 rows on 2 ranks make 12 batches, so 6 steps an epoch: step 8 lies in the second one.
    loop = partial(run, "accelerate", tmp_path / "run", *common, zero=in_configs(zero))
    whole = loop("--checkpointing_steps", 8)
    assert whole["train_loss"] == pytest.approx(math.log(len(PACKAGES)), rel=0.1)
    uninterrupted = load_file(tmp_path / "run" / "model.safetensors")

    resumed = loop("--resume_from_checkpoint", tmp_path / "run" / "step_8")
    assert resumed["eval_accuracy"] == whole["eval_accuracy"]
    for name, weight in load_file(tmp_path / "run" / "model.safetensors").items():
        torch.testing.assert_close(weight, uninterrupted[name], rtol=0, atol=0, msg=name)
    AutoTokenizer.from_pretrained(tmp_path / "run")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", ["bert", pytest.param("accelerate", marks=pytest.mark.slow), pytest.param("gpt", marks=pytest.mark.slow)]
)
def test_one_rank_trains_at_stage_3_and_reloads(name, tmp_path, monkeypatch):
    few = ("--max_train_samples", 32, "--max_eval_samples", 16, "--num_train_epochs", 1, "--output_dir", tmp_path)
    size = ("--config_overrides", TINY_GPT, "--block_size", 32)
    if name != "gpt":
        size = ("--config_overrides", TINY_BERT, "--max_seq_length", 16)
    script, config = SCRIPTS / f"finetune_{name}.py", CONFIGS / "accelerate" / "one_gpu.yaml"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = launch_forked(script, "--zero", CONFIGS / "zero3.yaml", *few, *size, config=config)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads((tmp_path / RESULTS_NAME).read_text(encoding="utf-8"))["processes"] == 1
    kind = AutoModelForCausalLM if name == "gpt" else AutoModelForSequenceClassification
    assert all(p.isfinite().all() for p in kind.from_pretrained(tmp_path).parameters())


@pytest.mark.short_cells("gpt-txt")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name, extension", [("bert", "tsv"), ("gpt", "txt")])
def test_the_logged_loss_is_the_mean_whatever_world_size_and_accumulation(tmp_path, name, extension):
    """At learning rate 0, one pass over the training rows has the loss that evaluation on the same rows has."""
    text = write(tmp_path / f"reviews.{extension}", REVIEWS[:32])
    small = f"{TINY_BERT if name == 'bert' else TINY_GPT},{NO_DROPOUT[name]}"
    results = run(
        *(name, tmp_path / "out", "--train_file", text, "--validation_file", text),
        *("--config_overrides", small, "--max_seq_length" if name == "bert" else "--block_size", 16),
        *("--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2, "--per_device_eval_batch_size", 2),
        *("--learning_rate", 0, "--num_train_epochs", 1, "--max_train_samples", 16, "--max_eval_samples", 16),
        *("--disable_tqdm", "true"),
    )
    assert results["train_loss"] == pytest.approx(results["eval_loss"], rel=1e-4)
    if name == "bert":
        assert results["train_loss"] == pytest.approx(math.log(2), rel=0.1)


@pytest.mark.timeout(120)
def test_a_mistake_ends_a_run_with_its_paragraph_and_no_traceback(tmp_path):
    text = write(tmp_path / "reviews.tsv", REVIEWS)
    script = SCRIPTS / "finetune_bert.py"
    done = launch_forked(script, "--train_file", text, "--label_column", "stars", "--output_dir", tmp_path / "out")
    assert done.returncode != 0
    assert "The train data has no column 'stars'; it has: sentence, label." in done.stderr
    assert "RecipeError" not in done.stderr


# What a run learns from where it is told nothing


@pytest.mark.slow
def test_standard_library_text_is_the_same_every_time_and_split_cleanly():
    splits = docstrings()
    assert splits["train"].to_list() == docstrings()["train"].to_list()
    assert not set(splits["train"]["text"]) & set(splits["validation"]["text"])
    assert set(splits["train"]["label"]) == set(splits["validation"]["label"]) == set(range(len(PACKAGES)))
    assert len(splits["train"]) > 1000
    assert sum(map(len, sources()["train"]["text"])) > 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("train", [train_for_classification, train_for_language_modeling])
def test_a_tokenizer_trained_twice_is_the_same(train):
    texts = docstrings()["validation"]["text"]
    assert train(texts).get_vocab() == train(texts).get_vocab()


def test_from_scratch_has_its_own_defaults_and_a_pretrained_model_keeps_the_usual_ones(tmp_path):
    kinds = (ModelArguments, TrainingArguments)
    settings = {"defaults": {"output_dir": str(tmp_path)}, "from_scratch": {"learning_rate": 1e-3}}
    _, scratch = parse_arguments(*kinds, **settings, args=[])
    _, pretrained = parse_arguments(*kinds, **settings, args=["--model_name_or_path", "some/model", "--do_eval"])
    assert (scratch.learning_rate, scratch.do_train, scratch.do_eval) == (1e-3, True, True)
    assert (pretrained.learning_rate, pretrained.do_train, pretrained.do_eval) == (5e-5, False, True)


def test_the_configuration_of_a_dataset_may_follow_its_name():
    data = DataArguments(dataset_name="glue/sst2")
    assert (data.dataset_name, data.dataset_config_name) == ("nyu-mll/glue", "sst2")
    assert DataArguments(dataset_name="stanfordnlp/sst2").dataset_config_name is None


# Files


def test_a_tsv_needs_no_header_and_keeps_quotes_and_words_for_nothing(tmp_path):
    rows = [('a "quoted start', "1"), ("null", "0"), ("NA", "1"), ("plain", "0")]
    headerless = load_files(str(write(tmp_path / "plain.tsv", rows)), None)["train"]
    with_header = load_files(str(write(tmp_path / "header.tsv", [("sentence", "label"), *rows])), None)["train"]
    assert headerless.to_list() == with_header.to_list()
    assert headerless["sentence"] == [text for text, _ in rows]


@pytest.mark.parametrize("extension", ["csv", "json", "jsonl"])
def test_files_of_every_kind_become_text_and_numbered_labels(tmp_path, extension):
    path = tmp_path / f"reviews.{extension}"
    if extension == "csv":
        write(path, [("text", "label"), *REVIEWS], ",")
    else:
        path.write_text("\n".join(json.dumps({"text": text, "label": label}) for text, label in REVIEWS), "utf-8")
    splits = load_classification(ClassificationArguments(train_file=str(path), max_train_samples=8), seed=0)
    assert splits["train"].features["label"].names == ["bad", "good"]
    assert len(splits["train"]) == 8 and len(splits["validation"]) == 2


@pytest.mark.skipif(not SST2.is_dir(), reason=f"no SST-2 in {SST2}")
def test_sst2_files_are_read_as_they_come():
    data = ClassificationArguments(train_file=str(SST2 / "train.tsv"), validation_file=str(SST2 / "dev.tsv"))
    splits = load_classification(data, seed=0)
    assert splits.num_rows == {"train": 6920, "validation": 872}
    assert splits["train"].features["label"].names == ["0", "1"]
    assert splits["train"][0]["text"].startswith("a stirring , funny")


def test_labels_are_ordered_as_numbers_and_rows_drawn_at_random():
    rows = Dataset.from_dict({"text": list("abcd"), "label": [10, 2, 1, 2]})
    encoded = encode_labels(DatasetDict(train=rows, validation=rows), "label")["train"]
    assert encoded.features["label"].names == ["1", "2", "10"]
    assert encoded["label"] == [2, 1, 0, 1]
    assert len(at_most(rows, 3, seed=0)) == 3
    assert at_most(rows, 3, seed=0)["text"] != rows["text"][:3]
    assert at_most(rows, 9, seed=0) is rows


# Mistakes


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"dataset_name": "imdb", "train_file": "a.tsv"}, "--dataset_name imdb and --train_file a.tsv"),
        ({"validation_file": "a.tsv"}, "--validation_file a.tsv stands alone"),
        ({"max_train_samples": 0}, "--max_train_samples is 0; allowed: a whole number from 1"),
        ({"validation_split_percentage": 90}, "--validation_split_percentage is 90; allowed: 1 to 50"),
    ],
)
def test_contradicting_data_arguments(settings, said):
    with pytest.raises(RecipeError, match=said):
        DataArguments(**settings)


def test_a_pretrained_model_brings_its_configuration():
    with pytest.raises(RecipeError, match="--model_name_or_path some/model brings its own configuration"):
        ModelArguments(model_name_or_path="some/model", config_overrides="hidden_size=2")


@pytest.mark.parametrize("overrides", ["hiden_size=32", "hidden_size", "hidden_size=big"])
def test_config_overrides_that_do_not_fit(overrides):
    with pytest.raises(RecipeError, match=f"--config_overrides {overrides} does not fit BertConfig"):
        config_from_scratch(ModelArguments(config_overrides=overrides), BertConfig())


def test_files_that_cannot_be_read(tmp_path):
    write(tmp_path / "reviews.tsv", REVIEWS)
    with pytest.raises(RecipeError, match=r"no file .*review\.tsv'; that folder holds reviews\.tsv"):
        load_files(str(tmp_path / "review.tsv"), None)
    with pytest.raises(RecipeError, match=r"'\.xlsx'.*allowed: \.tsv, \.csv, \.json, \.jsonl"):
        load_files(str(write(tmp_path / "reviews.xlsx", REVIEWS)), None)
    with pytest.raises(RecipeError, match=r"'\.txt'.*allowed"):
        load_files(str(write(tmp_path / "reviews.txt", REVIEWS)), None)
    with pytest.raises(RecipeError, match=r"empty\.tsv is empty"):
        load_files(str(write(tmp_path / "empty.tsv", [])), None)
    with pytest.raises(RecipeError, match="a header line and no rows"):
        load_files(str(write(tmp_path / "header.tsv", [("sentence", "label")])), None)


def test_columns_that_are_not_there():
    rows = Dataset.from_dict({"review": ["fine"], "stars": [3]})
    splits = DatasetDict(train=rows, validation=rows)
    assert find_columns(splits, "--text_column", "review", TEXT_NAMES) == ["review"]
    with pytest.raises(RecipeError, match=r"no column 'body'; it has: review, stars\. .*--text_column"):
        find_columns(splits, "--text_column", "body", TEXT_NAMES)
    with pytest.raises(RecipeError, match="no column named text or sentence or content; it has: review, stars"):
        find_columns(splits, "--text_column", None, TEXT_NAMES)


def test_labels_that_cannot_be_learned():
    good = Dataset.from_dict({"text": ["a", "b"], "stars": ["good", "good"]})
    mixed = Dataset.from_dict({"text": ["a", "b"], "stars": ["good", "awful"]})
    with pytest.raises(RecipeError, match="label 'awful' in its column 'stars', which no row of the training data has"):
        encode_labels(DatasetDict(train=good, validation=mixed), "stars")
    with pytest.raises(RecipeError, match="Every row of the training data has the same label"):
        encode_labels(DatasetDict(train=good, validation=good), "stars")


def test_text_shorter_than_a_block():
    texts = Dataset.from_dict({"text": ["a few words"]})
    tokenizer = train_for_language_modeling(texts["text"])
    with pytest.raises(RecipeError, match="shorter than one block of 64 tokens"):
        pack(DatasetDict(train=texts, validation=texts), tokenizer, 64)


def test_an_output_folder_that_cannot_be_written(tmp_path):
    check_writable(str(tmp_path / "new" / "folder"))
    blocked = write(tmp_path / "file", REVIEWS) / "folder"
    with pytest.raises(RecipeError, match=re.escape(f"The output folder '{blocked}' cannot be written to")):
        check_writable(str(blocked))


def test_resuming_from_what_is_no_checkpoint(tmp_path):
    assert checkpoint_to_resume(None, str(tmp_path)) is None
    with pytest.raises(RecipeError, match=r"asks for the last checkpoint.*holds no checkpoint"):
        checkpoint_to_resume("true", str(tmp_path))
    (tmp_path / "checkpoint-7").mkdir()
    with pytest.raises(RecipeError, match=r"does not exist; .* holds checkpoint-7"):
        checkpoint_to_resume(str(tmp_path / "checkpoint-8"), str(tmp_path))
    with pytest.raises(RecipeError, match=r"has no trainer_state.json"):
        checkpoint_to_resume(str(tmp_path / "checkpoint-7"), str(tmp_path))
    assert checkpoint_to_resume("true", str(tmp_path)) is True
    assert checkpoint_to_resume("last-good", str(tmp_path)) == "last-good"

    assert step_to_resume(None) == 0
    with pytest.raises(RecipeError, match="its name is not `step_` and a number"):
        step_to_resume(str(tmp_path))
    with pytest.raises(RecipeError, match="there is no such folder"):
        step_to_resume(str(tmp_path / "step_9"))


def test_resuming_without_the_tokenizer_of_the_first_run(tmp_path):
    with pytest.raises(RecipeError, match=r"holds none \(tokenizer.json\)"):
        load_or_train(ModelArguments(), train_for_classification, [], str(tmp_path), resuming=True)


# ---- real text: the accuracy curve of every stage is DDP's, to the digit, and what is inexact stays near it ----

needs_sst2 = pytest.mark.skipif(not SST2.is_dir(), reason="the SST-2 sentences are not on this machine")

Curve = list[tuple[int, float, float]]
"""(step, accuracy, loss) of each evaluation."""


def trained(script: str, *flags: object) -> None:
    """Runs a recipe on two ranks."""
    done = launch_forked(SCRIPTS / script, *flags, time_limit_s=400)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def curve(tmp_path_factory) -> Callable[..., Curve]:
    """`curve(zero, seed)` of a run of the recipe from scratch, by stock DDP where `zero` is None; one of a kind is run once."""

    @functools.cache
    def of(zero: str | None, seed: int) -> Curve:
        folder = tmp_path_factory.mktemp("curve")
        trained(
            "finetune_bert.py",
            *("--train_file", SST2 / "train.tsv", "--validation_file", SST2 / "dev.tsv"),
            *("--max_seq_length", 48, "--max_steps", 200, "--eval_strategy", "steps", "--eval_steps", 40),
            *("--config_overrides", "hidden_size=64,intermediate_size=128", "--save_strategy", "no"),
            *("--seed", seed, "--output_dir", folder, *(() if zero is None else ("--zero", zero))),
        )
        history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        return [(e["step"], e["eval_accuracy"], e["eval_loss"]) for e in history if "eval_accuracy" in e]

    return of


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_sst2
def test_accuracy_curve_is_ddps(curve):
    expected = curve(None, 1)
    assert len(expected) >= 5
    for stage in ("1", "2"):
        found = curve(stage, 1)
        print("step, accuracy, loss of DDP and of stage", stage, *zip(expected, found), sep="\n")
        # Clipping bites here, so losses may differ in the last digit of a float; which class is likeliest may not.
        assert [(step, accuracy) for step, accuracy, _ in found] == [(step, accuracy) for step, accuracy, _ in expected]
        assert [loss for *_, loss in found] == pytest.approx([loss for *_, loss in expected], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_sst2
def test_accuracy_is_kept_where_gradients_and_weights_travel_in_8_bits(curve):
    exact, *quantized = (
        "2",
        "stage=2,comm.gradients=int8,comm.weights=int8",
        "stage=3,comm.gradients=int8,comm.weights=int8",
    )
    sums = dict.fromkeys((exact, *quantized), 0.0)
    for seed in (1, 2):
        for settings in sums:
            found = curve(settings, seed)
            sums[settings] += found[-1][1]
            print(f"seed {seed}, {settings}: {found}")
    means = {settings: total / 2 for settings, total in sums.items()}
    print("mean accuracy:", ", ".join(f"{settings}: {mean:.4f}" for settings, mean in means.items()))
    assert all(abs(means[settings] - means[exact]) <= 0.005 for settings in quantized)


def text_loss(folder: Path, *flags: object) -> float:
    """The loss of the GPT recipe's model on text that it has not seen, after training on the source of the standard library."""
    few = ("--save_strategy", "no", "--max_eval_samples", 200, "--block_size", 64)
    trained("finetune_gpt.py", *few, "--output_dir", folder, *flags)
    return json.loads((folder / "results.json").read_text())["eval_loss"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_steps_apart_learn_what_steps_together_learn(tmp_path):
    before = text_loss(tmp_path / "base", "--zero", 1, "--max_steps", 160)
    more = ("--model_name_or_path", tmp_path / "base", "--learning_rate", 5e-4, "--max_steps", 96)
    together = text_loss(tmp_path / "together", "--zero", 1, *more)
    apart = text_loss(tmp_path / "apart", "--zero", "stage=1,comm.sync_every=16", *more)
    print(f"loss before {before:.4f}, after 96 steps together {together:.4f}, apart with H = 16 {apart:.4f}")
    assert together < before
    assert apart <= 1.02 * together
