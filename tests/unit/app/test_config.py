"""Environment variables become one checked Config."""

import itertools
import logging
import re

import pytest
from bge_m3_server.adapters.memory.cpu_count import cpu_count
from bge_m3_server.app.config import (
    DEFAULT_WARMUP_SHAPES,
    ExecutionProvider,
    LogFormat,
    ModelVariant,
    load_config,
)
from bge_m3_server.app.container.model import intra_threads
from bge_m3_server.app.ignored_settings import ONLY_WITH, WITHOUT_EFFECT_YET
from bge_m3_server.domain.errors import ConfigError

CPUS = cpu_count()


def config(**environment):
    return load_config(environment, "linux")


def test_nothing_set_gives_the_documented_defaults():
    """An empty environment is a complete configuration."""
    loaded = config()

    assert str(loaded.cache_dir) == "/cache"
    assert (loaded.host, loaded.port) == ("0.0.0.0", 8081)
    assert (loaded.workers, loaded.intra_threads) == (None, None)
    assert (loaded.max_batch, loaded.max_seq_length) == (256, 8192)
    assert loaded.max_body_bytes == 33_554_432
    assert (loaded.idle_timeout_seconds, loaded.heartbeat_seconds) == (300, 60)
    assert loaded.memory_safety_factor == 0.7
    assert loaded.execution_provider is ExecutionProvider.AUTO
    assert loaded.model is ModelVariant.AUTO
    assert loaded.log_format is LogFormat.AUTO
    assert loaded.trt_warmup_shapes == DEFAULT_WARMUP_SHAPES
    assert len(DEFAULT_WARMUP_SHAPES) == 24
    assert loaded.notices == ()


@pytest.mark.parametrize(
    ("provider", "variant"),
    [("cuda", ModelVariant.FP16), ("tensorrt", ModelVariant.FP16), ("cpu", ModelVariant.FP32)],
)
def test_the_default_precision_follows_the_provider(provider, variant):
    """fp16 is the GPU default and fp32 the CPU one, where fp16 is several times slower."""
    assert config(BGE_M3_EP=provider).hub_variant is variant
    assert config(BGE_M3_EP=provider, BGE_M3_MODEL="int8").hub_variant is ModelVariant.INT8


@pytest.mark.parametrize(
    ("provider", "model"),
    [*itertools.product(["auto", "cpu", "openvino"], ["auto", "w8"]), ("coreml", "auto")],
)
def test_a_prepared_model_is_made_of_the_full_one(provider, model):
    """Outside NVIDIA, what is fetched for `auto` and `w8` is fp32."""
    loaded = config(BGE_M3_EP=provider, BGE_M3_MODEL=model)

    assert loaded.model is ModelVariant(model)
    assert loaded.execution_provider is ExecutionProvider(provider)
    assert loaded.hub_variant is ModelVariant.FP32


@pytest.mark.parametrize("model", ["fp32", "fp16", "int8", "preview"])
def test_a_model_that_is_served_as_it_is_is_fetched_by_its_name(model):
    """Whatever the provider."""
    for provider in ("auto", "openvino", "cuda"):
        loaded = config(BGE_M3_EP=provider, BGE_M3_MODEL=model)
        assert loaded.hub_variant is loaded.model is ModelVariant(model)


def test_macos_defaults_to_coreml():
    """On macOS the execution provider is CoreML unless another is named."""
    assert load_config({}, "darwin").execution_provider is ExecutionProvider.COREML
    assert load_config({"BGE_M3_EP": "cpu"}, "darwin").execution_provider is ExecutionProvider.CPU


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("BGE_M3_WORKERS", "0", "workers", 1),
        ("BGE_M3_INTRA_THREADS", "0", "intra_threads", 1),
        ("BGE_M3_MAX_BATCH", "0", "max_batch", 1),
        ("BGE_M3_GPU_COUNT", "0", "gpu_count", 1),
        ("BGE_M3_MAX_SEQ_LENGTH", "99999", "max_seq_length", 8192),
        ("BGE_M3_MAX_SEQ_LENGTH", "0", "max_seq_length", 8192),
        ("BGE_M3_MAX_SEQ_LENGTH", "-5", "max_seq_length", 8192),
        ("BGE_M3_MAX_SEQ_LENGTH", "9" * 401, "max_seq_length", 8192),
        ("BGE_M3_MEMORY_SAFETY_FACTOR", "-1", "memory_safety_factor", 0.1),
        ("BGE_M3_MEMORY_SAFETY_FACTOR", "0.0", "memory_safety_factor", 0.1),
        ("BGE_M3_MEMORY_SAFETY_FACTOR", "2.0", "memory_safety_factor", 1.0),
    ],
)
def test_a_promised_clamp_bends_the_value_and_says_so(name, value, field, expected):
    """Values outside a range that promises a clamp are bent, with one notice."""
    loaded = config(**{name: value})

    assert getattr(loaded, field) == expected
    assert any(notice.startswith(name) for notice in loaded.notices)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BGE_M3_WORKERS", "two"),
        ("BGE_M3_WORKERS", "-1"),
        ("BGE_M3_WORKERS", " 2"),
        ("BGE_M3_WORKERS", "2_0"),
        ("BGE_M3_WORKERS", "٢"),
        ("BGE_M3_MAX_SEQ_LENGTH", "8k"),
        ("BGE_M3_MAX_BODY_BYTES", "0"),
        ("BGE_M3_MEMORY_SAFETY_FACTOR", "nan"),
        ("BGE_M3_MEMORY_SAFETY_FACTOR", "inf"),
        ("BGE_M3_COST_MODEL_A", "-1"),
        ("BGE_M3_EP", "CUDA"),
        ("BGE_M3_EP", "onnxruntime"),
        ("BGE_M3_EP", " auto"),
        ("BGE_M3_MODEL", "fp8"),
        ("BGE_M3_MODEL", "W8"),
        ("BGE_M3_BIND", "8081"),
        ("BGE_M3_BIND", "0.0.0.0:99999"),
        ("BGE_M3_BIND", ":8081"),
        ("BGE_M3_BIND", "[::1"),
        ("BGE_M3_BIND", "::1"),
        ("BGE_M3_BIND", "a" * 300 + ":80"),
        ("BGE_M3_BIND", "ho st:80"),
        ("BGE_M3_WORKERS", "100000"),
        ("BGE_M3_INTRA_THREADS", "99999999999999"),
        ("BGE_M3_WARMUP_ONLY", "on"),
        ("BGE_M3_LOG_FORMAT", "xml"),
        ("BGE_M3_MODEL_DIR", "/no/such/directory"),
        ("BGE_M3_ONNX_BATCH_SIZE", "many"),
        ("RUST_LOG", "loud"),
    ],
)
def test_an_invalid_value_is_refused_by_name(name, value):
    """The message names the variable, the value and what is allowed."""
    with pytest.raises(ConfigError, match=rf"{name}='?{re.escape(value)}'?: "):
        config(**{name: value})


@pytest.mark.parametrize("name", ONLY_WITH)
@pytest.mark.parametrize("engine", ["auto", "openvino", "cpu", "cuda", "tensorrt", "coreml"])
def test_a_setting_of_another_engine_is_pointed_out(name, engine):
    """It is ignored, which is worth a word; one of this engine is not."""
    value = "default" if name.endswith("STRATEGY") else "1"
    notices = config(**{name: value, "BGE_M3_EP": engine}).notices

    assert any(
        notice.startswith(f"{name} counts only with ") and notice.endswith(f"with {engine}")
        for notice in notices
    ) == (engine not in ONLY_WITH[name])


def test_the_preview_has_no_directory(tmp_path):
    """Two answers to what is to be served are one too many."""
    with pytest.raises(ConfigError, match="set only one of them"):
        config(BGE_M3_MODEL="preview", BGE_M3_MODEL_DIR=str(tmp_path))


@pytest.mark.parametrize("engine", ["cuda", "tensorrt", "coreml"])
def test_eight_bits_are_refused_for_engines_that_they_are_not_made_for(engine):
    """The message names both values and both ways out."""
    with pytest.raises(ConfigError, match=rf"=w8 .* BGE_M3_EP={engine}: .*fp16.* cpu or openvino"):
        config(BGE_M3_MODEL="w8", BGE_M3_EP=engine)


def test_eight_bits_are_refused_where_core_ml_is_the_default():
    """Also on macOS, where nobody has named that engine."""
    with pytest.raises(ConfigError, match="BGE_M3_EP=coreml"):
        load_config({"BGE_M3_MODEL": "w8"}, "darwin")


def test_all_problems_come_in_one_message():
    """One start reports everything that is wrong."""
    with pytest.raises(ConfigError) as caught:
        config(BGE_M3_WORKERS="x", BGE_M3_EP="y", BGE_M3_BIND="z")

    assert str(caught.value).count("BGE_M3_") == 3


def test_an_empty_value_counts_as_unset():
    """Compose files and templates leave empty variables behind."""
    assert config(BGE_M3_WORKERS="", BGE_M3_CACHE_DIR="", BGE_M3_EP="") == config()


def test_ipv6_addresses_can_be_bound():
    """The host may be an IPv6 address in brackets."""
    loaded = config(BGE_M3_BIND="[::1]:9000")

    assert (loaded.host, loaded.port) == ("::1", 9000)


@pytest.mark.parametrize(
    ("value", "shapes"),
    [
        ("1x128,1x512", ((1, 128), (1, 512))),
        ("1x128,bad,1x512", ((1, 128), (1, 512))),
        ("4x256,1x8192", ((4, 256), (1, 8192))),
        ("bad,also_bad,nope", DEFAULT_WARMUP_SHAPES),
        (f"1x{'9' * 5000},4x256", ((4, 256),)),
        (" ", DEFAULT_WARMUP_SHAPES),
    ],
)
def test_warm_up_shapes_skip_what_they_cannot_read(value, shapes):
    """Bad tokens are skipped with a notice; nothing left means the default grid."""
    loaded = config(BGE_M3_TRT_WARMUP_SHAPES=value)

    assert loaded.trt_warmup_shapes == shapes
    for token in value.split(","):
        if "bad" in token or token == "nope":
            assert any(repr(token) in notice for notice in loaded.notices)


@pytest.mark.parametrize("name", WITHOUT_EFFECT_YET)
def test_a_variable_without_effect_says_so_once(name):
    """Setting a variable that does nothing yet gives one notice, with what happens instead."""
    loaded = config(**{name: "1x128" if name.endswith("SHAPES") else "1"})

    assert [notice for notice in loaded.notices if notice.startswith(name)] == [
        f"{name} is set but has no effect yet in this version: {WITHOUT_EFFECT_YET[name]}"
    ]


def test_the_deprecated_batch_size_is_handed_on():
    """Whoever resolves the budget translates it, and warns."""
    assert config(BGE_M3_ONNX_BATCH_SIZE="16").onnx_batch_size == 16
    assert config().onnx_batch_size is None


@pytest.mark.parametrize(("variables", "threads"), [({}, 1), ({"BGE_M3_INTRA_THREADS": "3"}, 3)])
def test_threads_are_shared_out_among_workers(variables, threads, caplog):
    """More workers than CPUs get one thread each, and the log names the source of the CPUs."""
    caplog.set_level(logging.INFO)
    assert intra_threads(config(**variables), workers=10_000) == threads
    assert intra_threads(config(**variables), workers=1) == (threads if variables else CPUS.count)
    assert {record.fields["source"] for record in caplog.records} <= {CPUS.source}


def test_a_misspelt_variable_is_pointed_out():
    """An unknown BGE_M3_ variable is named together with the closest known one."""
    (notice,) = config(BGE_M3_WORKER="4").notices

    assert notice == (
        "BGE_M3_WORKER is not a variable of this server and is ignored; "
        "did you mean BGE_M3_WORKERS?"
    )


def test_log_directives_set_levels_by_logger():
    """A bare level is the default; logger=level narrows it."""
    assert config(RUST_LOG="warn,bge_m3_server=debug").log_levels == {
        "": logging.WARNING,
        "bge_m3_server": logging.DEBUG,
    }
