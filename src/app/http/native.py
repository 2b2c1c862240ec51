"""The routes of BGE-M3's own outputs: lexical weights, alone or with the dense vector."""

from functools import partial
from typing import Any

from litestar import Request, post
from litestar.di import NamedDependency
from litestar.params import JSONBody

from ...domain.types import Heads
from .bodies import JsonRequest, require_json
from .docs import (
    BOTH_EXAMPLE,
    ERRORS,
    REQUEST_EXAMPLES,
    SPARSE_EXAMPLE,
    TRUNCATION_HEADER,
    documented,
)
from .embedding_door import Answer, EmbeddingDoor
from .encoding import DenseForm, both_answer, sparse_answer
from .schemas import (
    BothEmbeddingsResponse,
    EmbeddingsRequest,
    SparseEmbeddingsRequest,
    SparseEmbeddingsResponse,
)


@post(
    "/v1/sparse-embeddings",
    status_code=200,
    guards=[require_json],
    request_class=JsonRequest,
    summary="Lexical weights",
    description="One sparse vector per text: vocabulary ids of XLM-RoBERTa and their weights.",
    tags=["embeddings"],
    responses=ERRORS,
    response_headers=[TRUNCATION_HEADER],
    operation_class=documented(requests=REQUEST_EXAMPLES, answer=SPARSE_EXAMPLE),
)
async def create_sparse_embeddings(
    request: Request[Any, Any, Any],
    data: JSONBody[SparseEmbeddingsRequest],
    door: NamedDependency[EmbeddingDoor],
) -> Answer[SparseEmbeddingsResponse]:
    """Lexical weights of the texts."""
    model = door.ready_model()
    return await door.answer(
        request,
        route="sparse",
        texts=data.input,
        heads=Heads.SPARSE,
        write=partial(sparse_answer, model=model),
    )


@post(
    "/v1/embeddings:both",
    status_code=200,
    guards=[require_json],
    request_class=JsonRequest,
    summary="Dense vectors and lexical weights",
    description=(
        "Both outputs for the price of one forward pass. "
        "The colon may be sent percent-encoded: `/v1/embeddings%3Aboth`."
    ),
    tags=["embeddings"],
    responses=ERRORS,
    response_headers=[TRUNCATION_HEADER],
    operation_class=documented(requests=REQUEST_EXAMPLES, answer=BOTH_EXAMPLE),
)
async def create_both_embeddings(
    request: Request[Any, Any, Any],
    data: JSONBody[EmbeddingsRequest],
    door: NamedDependency[EmbeddingDoor],
) -> Answer[BothEmbeddingsResponse]:
    """Dense vectors and lexical weights of the texts."""
    model = door.ready_model()
    form = DenseForm.asked(data.encoding_format, data.dimensions, model)
    return await door.answer(
        request,
        route="both",
        texts=data.input,
        heads=Heads.DENSE | Heads.SPARSE,
        write=partial(both_answer, model=model, form=form),
    )
