"""The flags of a model that runs elsewhere, behind OpenAI's protocol: ``--endpoint URL``.

What only makes sense for a model on this machine is refused beside them.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, cast

from localrt.cli.model_options import DEMO_MODEL, load_options
from localrt.errors import OptionError
from localrt.settings import ENDPOINT_KEY, Settings

if TYPE_CHECKING:
    from localrt.api import Model
    from localrt.progress import ProgressCallback

__all__ = ["add_endpoint_arguments", "choose_model", "connect_endpoint", "model_title"]


def add_endpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--endpoint",
        metavar="URL",
        help="use a model of this server (vLLM, localrt serve, any of OpenAI's protocol); MODEL is "
        "its name there, by default the first that the server lists",
    )
    group.add_argument(
        "--api-key", metavar="KEY", help=f"for the server; better in ${ENDPOINT_KEY}, '' sends none"
    )


def choose_model(args: argparse.Namespace) -> None:
    """Check the flags against the others; without a server, MODEL has a default.

    Raises:
        OptionError: they do not go together.
    """
    if args.endpoint is None:
        if args.api_key is not None:
            raise OptionError("--api-key goes with --endpoint URL")
        args.model = DEMO_MODEL if args.model is None else args.model
        return
    from localrt.remote.address import read_address

    read_address(args.endpoint, _key(args))
    given = [name for name, value in load_options(args).items() if value not in (None, "auto")]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise OptionError(f"{flag} is about models on this machine: leave it out with --endpoint")


def connect_endpoint(args: argparse.Namespace, progress: ProgressCallback | None = None) -> Model:
    """The server's model."""
    from localrt.remote.model import connect

    model = connect(args.endpoint, args.model or None, api_key=_key(args), progress=progress)
    # It has what commands and the app use of a model.
    return cast("Model", model)


def model_title(args: argparse.Namespace) -> str:
    """What to call the model until it says its own name."""
    from localrt.remote.address import read_address

    return str(args.model or read_address(args.endpoint).place)


def _key(args: argparse.Namespace) -> str | None:
    key: str | None = args.api_key
    return Settings.from_environment().endpoint_key if key is None else key
