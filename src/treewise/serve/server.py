"""A server: journal, model, checkpoints, worker and routes, put together."""

from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from treewise.serve.app import Api
from treewise.serve.journal import Journal
from treewise.serve.settings import ServeSettings
from treewise.serve.store import Store
from treewise.serve.weights import ServedModel
from treewise.serve.worker import Worker
from treewise.trainer.run_lock import RunLock


def make_app(settings: ServeSettings, model: Any = None, tokenizer: Any = None) -> Starlette:
    """The application over the settings' folder, which no other server may hold. model, tokenizer: in place of those
    that the settings name.

    Raises:
        ConfigError: the model cannot be served, or the folder cannot be used.
    """
    folder = Path(settings.folder)
    folder.mkdir(parents=True, exist_ok=True)
    served = ServedModel(settings, model, tokenizer)
    if served.tokenizer is not None:
        served.tokenizer.save_pretrained(folder / "tokenizer")
    store = Store(folder, served, settings.names[0])
    journal = Journal(folder / "journal.sqlite")
    worker = Worker(settings, journal, served, store, lambda name: api.on_answer(name))
    api = Api(settings, worker)
    return api.app()


def serve(settings: ServeSettings) -> None:
    """Serves until a signal ends it; then the request at hand is finished, and models are saved.

    Raises:
        ConfigError: as `make_app`; or another server holds the folder.
    """
    with RunLock(settings.folder):
        app = make_app(settings)
        config = uvicorn.Config(
            app, host=settings.host, port=settings.port, access_log=False, timeout_graceful_shutdown=5, ws="none"
        )
        server = uvicorn.Server(config)
        server.run()  # prints the address
