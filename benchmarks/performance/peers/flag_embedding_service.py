"""The usual small service: OpenAI's route in FastAPI over `BGEM3FlagModel` in fp32.

MODEL_DIRECTORY=... uvicorn --app-dir benchmarks/performance/peers flag_embedding_service:app
"""

import os

from fastapi import FastAPI, HTTPException
from FlagEmbedding import BGEM3FlagModel
from pydantic import BaseModel

MAX_TEXTS = 256

app = FastAPI()
model = BGEM3FlagModel(os.environ["MODEL_DIRECTORY"], use_fp16=False, devices="cpu")


class Query(BaseModel):
    """What a client sends."""

    input: str | list[str]
    model: str = "bge-m3"


class Vector(BaseModel):
    """One dense vector."""

    object: str = "embedding"
    index: int
    embedding: list[float]


class Answer(BaseModel):
    """What a client gets; tokens are guessed from characters."""

    object: str = "list"
    model: str = "bge-m3"
    data: list[Vector]
    usage: dict[str, int]


@app.post("/v1/embeddings")
def embeddings(query: Query) -> Answer:
    """Dense vectors; a plain function, so every request runs in a thread of its own."""
    texts = query.input if isinstance(query.input, list) else [query.input]
    if not 0 < len(texts) <= MAX_TEXTS:
        raise HTTPException(400, f"expected 1 to {MAX_TEXTS} texts")
    vectors = model.encode(texts, batch_size=32, max_length=8192, return_dense=True)["dense_vecs"]
    tokens = sum(map(len, texts)) // 4
    return Answer(
        data=[
            Vector(index=index, embedding=vector.tolist()) for index, vector in enumerate(vectors)
        ],
        usage={"prompt_tokens": tokens, "total_tokens": tokens},
    )


@app.get("/health")
def health() -> dict[str, bool]:
    """The model is loaded before the socket is opened."""
    return {"ok": True}
