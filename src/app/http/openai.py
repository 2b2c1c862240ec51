"""The routes of OpenAI's embeddings API."""

from functools import partial
from typing import Any

from litestar import Request, get, post
from litestar.di import NamedDependency
from litestar.exceptions import NotFoundException
from litestar.params import FromPath, JSONBody
from msgspec import UNSET

from ...domain.types import Heads
from .bodies import JsonRequest, require_json
from .docs import (
    DENSE_EXAMPLE,
    ERRORS,
    MODEL_ERRORS,
    MODEL_EXAMPLE,
    MODELS_EXAMPLE,
    REQUEST_EXAMPLES,
    TRUNCATION_HEADER,
    documented,
)
from .embedding_door import Answer, EmbeddingDoor
from .encoding import DenseForm, dense_answer
from .schemas import EmbeddingsRequest, EmbeddingsResponse, ModelCard, ModelList


@post(
    "/v1/embeddings",
    status_code=200,
    guards=[require_json],
    request_class=JsonRequest,
    summary="Dense vectors",
    description="OpenAI's embeddings contract: one vector of length 1 per text.",
    tags=["embeddings"],
    responses=ERRORS,
    response_headers=[TRUNCATION_HEADER],
    operation_class=documented(requests=REQUEST_EXAMPLES, answer=DENSE_EXAMPLE),
)
async def create_embeddings(
    request: Request[Any, Any, Any],
    data: JSONBody[EmbeddingsRequest],
    door: NamedDependency[EmbeddingDoor],
) -> Answer[EmbeddingsResponse]:
    """Dense vectors of the texts."""
    model = door.ready_model()
    form = DenseForm.asked(data.encoding_format, data.dimensions, model)
    return await door.answer(
        request,
        route="dense",
        texts=data.input,
        heads=Heads.DENSE,
        write=partial(dense_answer, model=model, form=form),
    )


@get(
    "/v1/models",
    summary="Served models",
    description="The one loaded model; an empty list while it loads.",
    tags=["models"],
    operation_class=documented(answer=MODELS_EXAMPLE),
    sync_to_thread=False,
)
def list_models(
    door: NamedDependency[EmbeddingDoor], served_since: NamedDependency[int]
) -> ModelList:
    """The served models."""
    return ModelList(data=_cards(door, served_since))


@get(
    "/v1/models/{model_id:path}",
    summary="One served model",
    description="The id may contain slashes.",
    tags=["models"],
    responses=MODEL_ERRORS,
    operation_class=documented(answer=MODEL_EXAMPLE),
    sync_to_thread=False,
)
def get_model(
    model_id: FromPath[str],
    door: NamedDependency[EmbeddingDoor],
    served_since: NamedDependency[int],
) -> ModelCard:
    """The model of this id."""
    wanted = model_id.removeprefix("/")
    for card in _cards(door, served_since):
        if card.id == wanted:
            return card
    raise NotFoundException(
        f"the model {wanted!r} does not exist; GET /v1/models lists what is served",
        extra={"param": "model", "code": "model_not_found"},
    )


def _cards(door: EmbeddingDoor, created: int) -> list[ModelCard]:
    model = door.service.status().model
    if model is None:
        return []
    return [
        ModelCard(
            id=model.model_id,
            type="preview" if model.notice else "bge-m3",
            created=created,
            dimensions=model.dimensions,
            max_tokens=model.max_tokens,
            notice=model.notice or UNSET,
        )
    ]
