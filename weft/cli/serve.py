"""`weft serve`: serve a trained model over HTTP."""

from __future__ import annotations

import ipaddress
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from ..core.field_types import Range
from .flag_errors import validate_flags
from .generation import check_single_process, report_mesh_fallback
from .targets import CommandFailure, UsageError

TOKEN_VARIABLE = "WEFT_SERVE_TOKEN"

# Larger numbers are typing errors: they would not fit into any memory.
Size = Annotated[int, Range(at_least=1, at_most=2**20)]


@dataclass
class ServeCommand:
    """Serve a trained model over HTTP, with continuous batching.

    FOLDER is the folder of a run of weft train, or a Hugging Face folder with a model and its tokenizer. The
    endpoints are POST /v1/completions (compatible with OpenAI's), /translate and /score; GET /healthz and
    /metrics for monitoring; and a web page at / to try the model.

        weft serve runs/translate
        weft serve runs/lm --port 0 --rows 32 --mesh data=4 --layout batch:data
        weft serve runs/lm --host 0.0.0.0 --token-file token.txt

    By default the server is reachable from this machine only; see --host. With --token-file, or a token in
    the environment variable WEFT_SERVE_TOKEN, requests must send the header Authorization: Bearer TOKEN.
    SIGTERM and SIGINT stop the server once it has finished the accepted requests."""

    folder: Annotated[Positional[str], arg(metavar="FOLDER")]
    """The folder of a run, or a Hugging Face folder."""
    port: Annotated[int, Range(at_least=0, at_most=65535), arg(metavar="N")] = 8000
    """The port; 0 picks a free port and prints it."""
    host: Annotated[str, arg(metavar="ADDRESS")] = "127.0.0.1"
    """The address to listen on."""
    rows: Annotated[Size, arg(metavar="N")] = 16
    """The maximum batch size: texts generated concurrently. It affects memory, not results."""
    longest: Annotated[int, Range(at_least=2, at_most=2**20), arg(metavar="TOKENS")] = 256
    """The maximum number of tokens of an input and of an output (for a language model, of both together)."""
    stride: Annotated[Size, arg(metavar="N")] = 8
    """The number of tokens to decode before checking the queue for new requests."""
    step: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """The step of the checkpoint (default: the latest)."""
    average: Annotated[Size, arg(metavar="N")] = 1
    """Average the parameters of the last N checkpoints up to --step."""
    mesh: Annotated[str | None, arg(metavar="AXES", help_behavior_hint="")] = None
    """The device mesh, such as "data=4 model=2"; "" is a single device.
    The default is the mesh of training if there are enough devices, else a single device."""
    layout: Annotated[str | None, arg(metavar="RULES", help_behavior_hint="")] = None
    """The layout (default: as in training)."""
    token_file: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """A file with the token that requests must send."""
    most_waiting: Annotated[int, Range(at_least=1, below=2**31), arg(metavar="N")] = 256
    """The maximum number of queued texts; further requests get status 503."""
    timeout: Annotated[float, Range(at_least=0.001, at_most=1e6), arg(metavar="SECONDS")] = 60.0
    """The time limit for a response, for a client that stops reading, and for shutting down."""
    body_limit: Annotated[int, Range(at_least=1, at_most=2**40), arg(metavar="BYTES")] = 1 << 20
    """The maximum size of a request body."""

    def run(self) -> None:
        """Serve until a signal arrives."""
        validate_flags(self)
        token = self._token()
        from ..generate import TextGenerator
        from ..serve import build_app, listen_socket, serve
        from ..train import load

        check_single_process()
        run = load.load_run(self.folder, self.step, self.average, self.mesh, self.layout)
        report_mesh_fallback(run, self.mesh)
        generator = TextGenerator(
            run.model, run.tokenizer, run.mesh, run.layout, rows=self.rows, longest=self.longest
        )
        app = build_app(
            generator,
            name=Path(self.folder).resolve().name,
            token=token,
            timeout=self.timeout,
            body_limit=self.body_limit,
            stride=self.stride,
            most_waiting=self.most_waiting,
        )
        try:
            sock = listen_socket(self.host, self.port)
        except OSError as error:
            raise CommandFailure(
                f"error: can't listen on {self.host}, port {self.port}\n"
                f"  {getattr(error, 'strerror', None) or error}\n"
                "  the address must belong to this machine, and the port must be free\n\n"
                "hint: --port 0 picks a free port and prints it"
            ) from None
        if token is None and not _is_loopback(self.host):
            print(
                f"warning: anyone who can reach {self.host} can use this server; require a token with "
                "--token-file",
                file=sys.stderr,
            )
        shown = f"[{self.host}]" if ":" in self.host else self.host
        url = f"http://{shown}:{sock.getsockname()[1]}"
        print(f"compiling; will listen on {url}", file=sys.stderr, flush=True)

        def ready() -> None:
            print(f"serving {self.folder} on {url}", file=sys.stderr, flush=True)

        if not serve(app, sock, self.timeout, ready):
            raise app.state.engine.failure

    def _token(self) -> str | None:
        """The token, from a file or the environment; other users can read a command line."""
        if self.token_file is None:
            text, where = os.environ.get(TOKEN_VARIABLE), TOKEN_VARIABLE
            if text is None:
                return None
        else:
            where = str(self.token_file)
            try:
                text = self.token_file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(
                    f"can't read --token-file {where}",
                    getattr(error, "strerror", None) or "it is not UTF-8",
                    rule="the file contains a single word, the token",
                    hint="create one with openssl rand -hex 16 > token.txt",
                ) from None
        token = text.strip()
        if not token or not token.isascii() or len(token.split()) > 1:
            raise UsageError(
                f"no valid token in {where}",
                rule="a token is one word in ASCII, such as 32 hex digits",
                hint="create one with openssl rand -hex 16",
            )
        return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
