"""What a configuration builds: the network, the program, the corpus, and the errors of each."""

import re

import numpy as np
import pytest

import functional_par as fp

TOKENS = {"sequence_length": 8, "train_steps": 2, "global_batch_size": 4, "microbatches": 2}
GPT = {"d_model": 16, "n_layers": 2, "n_heads": 4}
LLAMA = {"name": "llama", "d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 24}


def config(model=GPT, **sections):
    return fp.Config.from_dict({"tokens": TOKENS, "model": model, **sections}, "x.yaml")


def test_a_gpt_has_the_sizes_of_the_file():
    leaves = config({**GPT, "vocab": 300, "d_ff": 20, "bias": False}).model().leaves
    assert leaves["embed.weight"].shape == (300, 16)
    assert leaves["blocks.1.mlp.up.weight"].shape == (20, 16)
    assert not any(path.endswith("bias") for path in leaves)


def test_a_llama_has_the_sizes_of_the_file():
    leaves = config(LLAMA).model().leaves
    assert leaves["blocks.0.attn.k.weight"].shape == (2, 4, 16)
    assert leaves["blocks.0.mlp.gate.weight"].shape == (24, 16)


def test_a_program_has_the_layout_of_the_file():
    parallelism = {"pp": 2, "tp": 2, "pp_engine": "afab", "tp_mode": "reduce_scatter", "stage_layers": [1, 3]}
    given = config({**GPT, "tie": True}, parallelism={**parallelism, "tp_linear_async_communication": True})
    plan = given.program().plan(given.mesh())
    assert (plan.schedule, plan.microbatches, plan.mode.value, plan.async_comm) == ("afab", 2, "REDUCE_SCATTER", True)
    assert [len(names) for names in plan.stages] == [1, 3]
    assert plan.specs["embed.weight"].owners == (0, 1)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_ranks_share_out_and_the_size_of_buckets_reach_the_plan(zero):
    given = config(optimizer={"zero_stage": zero}, parallelism={"dp": 2, "gradient_bucket_mb": 3.5})
    plan = given.program().plan(given.mesh())
    assert (plan.zero, plan.bucket_mb) == (zero, 3.5)
    assert config().program().plan(fp.Mesh()).bucket_mb == 48.0


@pytest.mark.parametrize(
    ("name", "schedule", "stages"),
    [
        ("1F1B", "1f1b", 2),
        ("GPipe", "afab", 2),
        ("Interleaved1F1B", "interleaved", 4),
        ("LoopedBFS", "looped-bfs", 4),
        ("InterleavedZeroBubble", "interleaved-zb", 4),
        ("ZBVZeroBubble", "zbv", 4),
        ("DualPipeV", "dualpipev", 4),
    ],
)
def test_keys_and_names_of_torchtitan_are_known(name, schedule, stages):
    parallelism = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": name}
    found = config(model=GPT | {"n_layers": 4}, parallelism=parallelism)
    plan = found.program().plan(found.mesh())
    assert (plan.schedule, len(plan.stages)) == (schedule, stages)


def test_stages_may_be_named_and_may_have_a_bound_of_memory():
    given = config(parallelism={"pp": 2, "stage_layers": ["embed", "block0-1 head"]})
    assert [len(names) for names in given.program().plan(given.mesh()).stages] == [1, 3]
    unequal = {"pp": 2, "stage_memory_gb": 1e-9}
    with pytest.raises(fp.CompositionError, match=r"no split of 4 layers on 2 stages fits into 0\.000000001 GB a rank"):
        config(parallelism=unequal).program().plan(fp.Mesh(pp=2))


def test_an_untied_head_stays_a_leaf_of_its_own():
    given = config()
    assert "head.weight" in given.program().plan(given.mesh()).specs


def test_what_does_not_fit_the_mesh_is_told_by_the_plan():
    given = config(parallelism={"tp": 3})
    with pytest.raises(fp.CompositionError, match="tp=3 does not divide"):
        given.program().plan(given.mesh())


def test_a_llama_without_pairs_of_dims_is_told():
    with pytest.raises(fp.ModelError, match="not a multiple of 2"):
        config({"name": "llama", "d_model": 12, "n_layers": 1, "n_heads": 4}).program()


def test_a_text_is_read_as_bytes(tmp_path):
    (tmp_path / "book.txt").write_text("hello " * 10)
    corpus = config(data={"text": str(tmp_path / "book.txt")}).corpus()
    assert (len(corpus), corpus.vocab) == (60, 256)


def test_token_files_are_read(tmp_path):
    ids = np.arange(20)
    np.save(tmp_path / "ids.npy", ids)
    ids.astype("<u2").tofile(tmp_path / "ids.bin")
    assert len(config(data={"tokens": str(tmp_path / "ids.npy")}).corpus()) == 20
    assert len(config(data={"tokens": str(tmp_path / "ids.bin"), "token_dtype": "uint16"}).corpus()) == 20


def test_raw_ids_need_their_dtype(tmp_path):
    with pytest.raises(fp.ConfigError, match=r"ids\.bin holds raw ids: give data\.token_dtype \(--token-dtype\)"):
        config(data={"tokens": "ids.bin"}).corpus()


def test_an_id_outside_the_vocabulary_is_told(tmp_path):
    np.save(tmp_path / "ids.npy", np.array([1, 99]))
    with pytest.raises(fp.DataError, match="token id 99 at position 1 is outside the vocabulary of 50"):
        config({**GPT, "vocab": 50}, data={"tokens": str(tmp_path / "ids.npy")}).corpus()


def test_a_vocabulary_without_every_byte_is_told(tmp_path):
    (tmp_path / "book.txt").write_text("hello")
    with pytest.raises(fp.ConfigError, match=r"^x\.yaml: model\.vocab is 100, but the text has ids up to 255"):
        config({**GPT, "vocab": 100}, data={"text": str(tmp_path / "book.txt")}).corpus()


def test_a_missing_or_empty_text_is_told(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(fp.DataError, match="does not exist"):
        config(data={"text": str(tmp_path / "nowhere.txt")}).corpus()
    with pytest.raises(fp.DataError, match="is empty"):
        config(data={"text": str(tmp_path / "empty.txt")}).corpus()


@pytest.mark.parametrize(
    ("given", "engine"),
    [
        ("Interleaved1F1B", "interleaved"),
        ("GPipe", "afab"),
        ("zb_h1", "zb-h1"),
        ("ZBVZeroBubble", "zbv"),
        ("one.csv", "one.csv"),
        (None, None),
    ],
)
def test_a_schedule_has_the_names_that_people_know_it_by(given, engine):
    assert config(parallelism={"pp": 2, "pp_engine": given}).sections.parallelism.pp_engine == engine


def test_stages_on_each_rank_reach_the_plan():
    given = config({**GPT, "n_layers": 6}, parallelism={"pp": 2, "pp_engine": "interleaved", "pp_chunks": 3})
    plan = given.program().plan(given.mesh())
    assert (len(plan.stages), plan.schedule) == (6, "interleaved")


def test_a_schedule_may_be_a_file(tmp_path):
    (tmp_path / "mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    given = config(parallelism={"pp": 2, "pp_engine": str(tmp_path / "mine.csv")})
    assert len(given.program().plan(given.mesh()).stages) == 2


@pytest.mark.parametrize(
    ("parallelism", "message"),
    [
        ({"pp_engine": "x.csv", "pp_chunks": 2}, r"pp_chunks=2, but x\.csv says itself which stages a rank has"),
        (
            {"pp_engine": "zbv", "pp_chunks": 3},
            r"x\.yaml: parallelism\.pp_chunks: schedule zbv: chunks=3, but it has 2",
        ),
        (
            {"stage_layers": ["embed", 3]},
            r"stage_layers: stage_pp\(split=\['embed', 3\]\): 3 is not a stage's layers by name",
        ),
        ({"stage_layers": [4]}, "stage_layers has 1 stages, but 1f1b on pp=2 ranks has 2. Make them equal"),
        (
            {"pp_engine": "interleaved", "stage_layers": [2, 2]},
            "stage_layers has 2 stages, but interleaved on pp=2 ranks has 4",
        ),
    ],
)
def test_pipeline_keys_that_do_not_fit_together_are_named(parallelism, message):
    with pytest.raises(fp.ConfigError, match=message):
        config(parallelism={"pp": 2, **parallelism})


def planned(**sections):
    return (
        config({"d_model": 16, "n_layers": 3, "n_heads": 4, **sections.pop("model", {})}, **sections)
        .program()
        .plan(fp.Mesh())
    )


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, {}),
        ({"recompute_layer": True}, dict.fromkeys(("block0", "block1", "block2"), "full")),
        ({"remat": "selective"}, dict.fromkeys(("block0", "block1", "block2"), "selective")),
        ({"remat": "none"}, {}),
        ({"remat": "full", "remat_layers": ["block0-1", "head"]}, dict.fromkeys(("block0", "block1", "head"), "full")),
        ({"recompute_layer": True, "remat": "full", "remat_layers": ["block2"]}, {"block2": "full"}),
    ],
)
def test_layers_run_again_as_the_file_says(keys, layers):
    assert planned(parallelism=keys).remat == layers


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"recompute_layer": True, "remat": "selective"},
            "parallelism.recompute_layer=true keeps the input of a layer alone, but",
        ),
        (
            {"remat_layers": ["block0"]},
            "parallelism.remat_layers is given without parallelism.remat. Set it to full or",
        ),
    ],
)
def test_keys_about_layers_that_run_again_fit_together(keys, words):
    with pytest.raises(fp.ConfigError, match=re.escape(words)):
        planned(parallelism=keys)


@pytest.mark.parametrize(
    ("dtype", "keys", "fp32", "said"),
    [
        ("float32", {}, True, "float32"),
        ("float64", {}, True, "float64"),
        ("bfloat16", {}, True, "bfloat16, accumulate, reduce and master in float32"),
        ("bfloat16", {"reduce": "bfloat16"}, True, "bfloat16, accumulate and master in float32"),
        ("bfloat16", {}, False, "bfloat16"),
        ("bfloat16", {"master": "float32"}, False, "bfloat16, master in float32"),
        ("bfloat16", {"accumulate": "bfloat16"}, False, "bfloat16"),
    ],
)
def test_dtypes_are_safe_unless_the_file_says_otherwise(dtype, keys, fp32, said):
    plan = planned(model={"dtype": dtype}, precision=keys, optimizer={"accumulate_grad_in_fp32": fp32})
    assert str(plan.precision) == said


@pytest.mark.parametrize(
    ("dtype", "keys", "words"),
    [
        (
            "bfloat16",
            {"accumulate": "bfloat16"},
            "precision.accumulate=bfloat16, but optimizer.accumulate_grad_in_fp32=true",
        ),
        (
            "float32",
            {"master": "bfloat16"},
            "precision: precision(compute=torch.float32, master=torch.bfloat16): the parameters",
        ),
    ],
)
def test_dtypes_that_do_not_fit_together_are_told(dtype, keys, words):
    with pytest.raises(fp.ConfigError, match=re.escape(words)):
        planned(model={"dtype": dtype}, precision=keys)
