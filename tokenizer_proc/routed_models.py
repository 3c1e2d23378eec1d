"""The models of a server as a tokenizer process has them: each with its tokenizer and its routes.

A body names its model. Where there are several, the name is read before anything else, and the
routes of that model handle the body.
"""

import itertools
from collections.abc import Callable, Iterator

import msgspec

from headrace.board.board import Board
from headrace.config.process_configs import ModelCard, TokenizerConfig
from headrace.errors import BAD_JSON, ModelNotFound
from headrace.ipc.messages import HttpRequest
from headrace.tokenizer_proc.encoding.encoder import Encoder
from headrace.tokenizer_proc.grammar.grammars import Grammars
from headrace.tokenizer_proc.images.images import Images
from headrace.tokenizer_proc.info_routes import InfoRoutes
from headrace.tokenizer_proc.jobs.job import Job
from headrace.tokenizer_proc.jobs.stages import Body, Stages
from headrace.tokenizer_proc.routes import load_routes, load_scripted, load_template


class NamedModel(msgspec.Struct):
    """The field of a body that names its model."""

    model: str | None = None


NAMES: msgspec.json.Decoder[NamedModel] = msgspec.json.Decoder(NamedModel)


class RoutedModel:
    """One of the models.

    Args:
        patience_s: as `ChatTemplate` has it.
        load_images: returns what prepares images.
    """

    def __init__(
        self,
        config: TokenizerConfig,
        card: ModelCard,
        about: InfoRoutes,
        patience_s: float | None = None,
        load_images: Callable[[Encoder], Images] | None = None,
    ) -> None:
        self.name = card.name
        scripted = load_scripted(config, card)
        self.encoder = Encoder(card.tokenizer_path)
        has_script = None if scripted is None else scripted.has_script
        self.grammars = Grammars(card, config.follows_grammars, has_script)
        self.images = None if load_images is None else load_images(self.encoder)
        template = load_template(config, card, patience_s)
        self.lacks_tools = template.lacks_tools
        self.routes = load_routes(
            config, card, about, template, self.encoder, self.grammars, self.images, scripted
        )


class RoutedModels:
    """All models, in the order of `TokenizerConfig.cards`."""

    def __init__(
        self,
        config: TokenizerConfig,
        board: Board,
        patience_s: float | None = None,
        load_images: Callable[[Encoder], Images] | None = None,
    ) -> None:
        about = InfoRoutes(config, board)
        self._all = [
            RoutedModel(config, card, about, patience_s, load_images) for card in config.cards
        ]
        self._places = {model.name: place for place, model in enumerate(self._all)}

    def __iter__(self) -> Iterator[RoutedModel]:
        return iter(self._all)

    def __getitem__(self, place: int) -> RoutedModel:
        return self._all[place]

    def job(
        self,
        request: HttpRequest,
        body: Body,
        stages: Callable[[RoutedModel, HttpRequest, Body], Stages],
    ) -> Job:
        """Return the job of a request, with the stages of the model that its body names."""
        name = named(body) if len(self._all) > 1 else None
        if name is not None and name not in self._places:
            error = ModelNotFound(name, *self._places)
            return Job(request, len(body), refused(error))
        place = 0 if name is None else self._places[name]
        return Job(request, len(body), stages(self._all[place], request, body), place)

    def encode(self, jobs: list[Job]) -> None:
        """Run jobs one stage further, those of a model together."""
        for place, model in enumerate(self._all):
            own = [job for job in jobs if job.model == place]
            if own:
                encode_together(model.encoder, own)


def encode_together(encoder: Encoder, jobs: list[Job]) -> None:
    """Run jobs of one model one stage further; one that fails for several is repeated for each."""
    try:
        found = iter(encoder.encode([text for job in jobs for text in job.texts]))
    except Exception as error:
        if len(jobs) == 1:
            jobs[0].fail(error)
        else:
            for job in jobs:
                encode_together(encoder, [job])
        return
    for job in jobs:
        job.advance(list(itertools.islice(found, len(job.texts))))


def named(body: Body) -> str | None:
    """Return the model that a body names; None of one that names none, or cannot be read."""
    try:
        return NAMES.decode(body).model
    except BAD_JSON:  # its route says what is wrong
        return None


def refused(error: ModelNotFound) -> Stages:
    """Fail at the first stage."""
    raise error
    yield []
