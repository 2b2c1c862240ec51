"""The `bge-m3-server` command."""

import argparse
import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import attrs

from .. import __version__
from ..domain.budget import conservative_coefficients
from ..domain.errors import BgeM3Error, ConfigError
from ..domain.probe_fit import Fit, fit_workspace
from .config import Config, ModelVariant, load_config
from .container import build_container
from .loading import LoadedModel
from .probe_report import probe_report
from .server import EXIT_BAD_CONFIGURATION, PROBE_STOP_SECONDS, local_host, serve
from .tuning import Tuner

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130
PICTURE_SUFFIXES = (".png", ".svg")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the process's exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        config = load_config(os.environ, sys.platform)
        code: int = parsed.run(config, parsed)
    except ConfigError as error:
        print(f"bge-m3-server: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    except BgeM3Error as error:
        print(f"bge-m3-server: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bge-m3-server",
        description="BGE-M3 dense and sparse embeddings over HTTP.",
        epilog="Configuration comes from BGE_M3_* environment variables; see the README.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("serve", help="answer HTTP requests")
    command.set_defaults(run=_serve)

    command = commands.add_parser("fetch", help="download a model and verify it")
    command.add_argument(
        "--variant",
        choices=[variant.value for variant in ModelVariant],
        help="default: BGE_M3_MODEL, or what suits BGE_M3_EP",
    )
    command.add_argument(
        "--dir",
        type=Path,
        dest="directory",
        help="put the files there, for BGE_M3_MODEL_DIR; default: the cache, BGE_M3_CACHE_DIR",
    )
    command.set_defaults(run=_fetch)

    command = commands.add_parser(
        "prepare", help="fetch the model and build its 8-bit form, as the first start does"
    )
    command.set_defaults(run=_prepare)

    command = commands.add_parser("probe", help="measure what forward passes need, and print it")
    command.add_argument(
        "--plot",
        type=_picture,
        metavar="FILE",
        help="draw it as well, as .png or .svg; needs the extra `plot`",
    )
    command.set_defaults(run=_probe)

    command = commands.add_parser("healthcheck", help="exit 0 if a local server is healthy")
    command.add_argument("--url", help="default: /health at the port of BGE_M3_BIND")
    command.add_argument("--timeout-seconds", type=float, default=3.0)
    command.set_defaults(run=_healthcheck)

    command = commands.add_parser("openapi", help="print the OpenAPI document")
    command.set_defaults(run=_openapi)
    return parser


def _serve(config: Config, _: argparse.Namespace) -> int:
    container = build_container(config)
    return serve(container.config(), container)


def _fetch(config: Config, parsed: argparse.Namespace) -> int:
    container = build_container(config)
    container.set_up_logging()
    if parsed.variant:
        config = attrs.evolve(config, model=ModelVariant(parsed.variant))
    variant = config.hub_variant
    files = container.fetch(variant, parsed.directory)
    print(f"{files.model_id} ({variant.value}) is complete and verified: {files.graph_path.parent}")
    if parsed.directory:
        print(f"serve it with: BGE_M3_MODEL_DIR={parsed.directory} bge-m3-server serve")
    return 0


def _prepare(config: Config, _: argparse.Namespace) -> int:
    if config.model not in {ModelVariant.AUTO, ModelVariant.W8}:
        raise ConfigError(
            f"BGE_M3_MODEL={config.model.value} is served as it is: nothing is prepared for it; "
            "set auto or w8"
        )
    if not config.execution_provider.is_cpu:
        engine = config.execution_provider.value
        raise ConfigError(
            f"BGE_M3_EP={engine} serves models as they are: nothing is prepared for it; set "
            f"BGE_M3_EP to cpu or openvino, or get the model for {engine} with "
            "`bge-m3-server fetch`"
        )
    container = build_container(attrs.evolve(config, model=ModelVariant.W8))
    container.set_up_logging()
    files = container.prepare()
    print(
        f"{files.model_id} ({files.precision}) is prepared and verified: {files.graph_path.parent}"
    )
    return 0


def _picture(raw: str) -> Path:
    path = Path(raw)
    if path.suffix not in PICTURE_SUFFIXES:
        raise argparse.ArgumentTypeError(f"expected a file that ends in .png or .svg, got {raw!r}")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path.parent} is no directory that can be written")
    return path


def _probe(config: Config, parsed: argparse.Namespace) -> int:
    config = attrs.evolve(config, disable_probe_cache=True)
    container = build_container(config)
    container.set_up_logging()
    model: LoadedModel = container.load_model()
    tuner: Tuner = container.tuner()
    try:
        measured = tuner.measure()
    except KeyboardInterrupt:
        if not tuner.stop(PROBE_STOP_SECONDS):
            os._exit(EXIT_INTERRUPTED)  # a pass cannot be interrupted, and ends badly if it is left
        raise
    if measured.probe is None:
        print(f"nothing was measured: {measured.reason}", file=sys.stderr)
        return EXIT_FAILURE
    conservative = conservative_coefficients(model.backends[0].contract)
    fit = fit_workspace(measured.probe.peaks, conservative, model.info.max_tokens)
    print(
        probe_report(
            measured.probe, fit, measured.cost_model, model.info.max_tokens, config.max_batch
        )
    )
    if not isinstance(fit, Fit):
        return EXIT_FAILURE
    if parsed.plot:
        container.plot_probe(
            parsed.plot,
            measured.probe.peaks,
            fit.coefficients,
            conservative=conservative,
        )
        print(f"drawn: {parsed.plot}")
    return 0


def _healthcheck(config: Config, parsed: argparse.Namespace) -> int:
    url = parsed.url or f"http://{local_host(config.host)}:{config.port}/health"
    # A proxy from the environment must not stand between a server and its own health check.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    if not url.startswith(("http://", "https://")):
        print(f"{url}: expected an http:// or https:// address", file=sys.stderr)
        return EXIT_FAILURE
    try:
        with opener.open(url, timeout=parsed.timeout_seconds) as response:
            print(response.read().decode())
            return 0
    except urllib.error.HTTPError as error:
        print(error.read().decode(errors="replace"), file=sys.stderr)
    except (OSError, ValueError, OverflowError, http.client.HTTPException) as error:
        print(f"{url}: {error}", file=sys.stderr)
    return EXIT_FAILURE


def _openapi(config: Config, _: argparse.Namespace) -> int:
    print(json.dumps(build_container(config).application().openapi_schema.to_schema(), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
