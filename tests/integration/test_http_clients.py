"""The official OpenAI SDK and LangChain against a real socket."""

import numpy as np
import openai
import pytest
from langchain_openai import OpenAIEmbeddings

from tests.support.fake_service import LOADING, embedding

pytest_plugins = ["tests.support.http_fixtures"]


@pytest.fixture
def sdk(address):
    with openai.OpenAI(base_url=f"{address.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def langchain(address, **options):
    return OpenAIEmbeddings(
        base_url=f"{address.url}/v1", api_key="unused", model="bge-m3", max_retries=0, **options
    )


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}], ids=["base64", "float"])
def test_sdk_embeddings(sdk, service, options):
    """The SDK reads the same float32 vectors by its base64 default and as floats."""
    values = np.float32([0.1, -1 / 3, 0.9])
    service.result = lambda index, _text: embedding(values + np.float32(index), tokens=3)
    answer = sdk.embeddings.create(input=["a", "b"], model="any", **options)
    assert [item.index for item in answer.data] == [0, 1]
    for item in answer.data:
        assert np.float32(item.embedding).tobytes() == (values + np.float32(item.index)).tobytes()
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == ("bge-m3", 6, 6)


def test_sdk_dimensions(sdk, service):
    """The SDK's `dimensions` gives a shorter vector of length 1."""
    service.result = lambda _index, _text: embedding([0.6, 0.0, 0.8])
    answer = sdk.embeddings.create(input="a", model="any", dimensions=1)
    assert answer.data[0].embedding == [1.0]


def test_sdk_bad_request(sdk):
    """The SDK's error carries message, type, parameter, code, status and request id."""
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.embeddings.create(
            input="a", model="any", dimensions=9, extra_headers={"x-request-id": "id-7"}
        )
    error = caught.value
    assert error.status_code == 400
    assert error.type == "invalid_request_error"
    assert error.param == "dimensions"
    assert str(error.code) == "400"
    assert error.request_id == "id-7"
    assert error.body["message"] == "dimensions 9 is outside 1 to 3, the dimensions of bge-m3"


def test_sdk_error_classes(sdk, service):
    """Each status becomes the SDK's own class of exception."""
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.UnprocessableEntityError):
        sdk.embeddings.create(input=1.5, model="any")
    service.failure = RuntimeError
    with pytest.raises(openai.InternalServerError):
        sdk.embeddings.create(input="a", model="any")
    service.state = LOADING
    with pytest.raises(openai.InternalServerError, match="model not ready"):
        sdk.embeddings.create(input="a", model="any")


def test_sdk_models(sdk):
    """The SDK lists the model and retrieves it by its id."""
    (model,) = sdk.models.list()
    assert sdk.models.retrieve(model.id) == model
    assert model.owned_by == "bge-m3-server"


def test_langchain_text(address, service):
    """LangChain gets vectors when it sends text."""
    service.result = lambda index, _text: embedding([float(index), 0.0, 1.0])
    client = langchain(address, check_embedding_ctx_length=False)
    assert client.embed_documents(["a", "b"]) == [[0.0, 0.0, 1.0], [1.0, 0.0, 1.0]]
    assert client.embed_query("c") == [0.0, 0.0, 1.0]
    assert [texts for texts, _ in service.calls] == [["a", "b"], ["c"]]


def test_langchain_token_ids(address, service):
    """What LangChain sends by default is refused with the name of the switch that helps."""
    client = langchain(address, check_embedding_ctx_length=False)
    cl100k_ids = [[9906, 1917]]  # by default it sends these for "Hello world"
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        client.client.create(input=cl100k_ids, model="bge-m3")
    assert service.calls == []
