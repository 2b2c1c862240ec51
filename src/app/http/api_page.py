"""A page that shows the OpenAPI document and sends requests, complete in itself.

The pages that Litestar brings load their scripts from a content delivery network, which a server
inside a closed network cannot reach.
"""

import json
from collections.abc import Iterator
from html import escape
from string import Template
from typing import Any

from litestar import Request
from litestar.openapi.plugins import OpenAPIRenderPlugin

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title $version</title>
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
details { border: 1px solid #8886; border-radius: .4rem; margin: .5rem 0; padding: .5rem 1rem }
summary { cursor: pointer }
summary b { display: inline-block; min-width: 3.5rem }
code, pre, textarea { font: .85rem/1.45 ui-monospace, monospace }
pre { overflow: auto; max-height: 24rem; padding: .6rem; background: #8882; border-radius: .3rem }
textarea { box-sizing: border-box; width: 100% }
</style>
</head>
<body>
<h1>$title <small>$version</small></h1>
<p>$description</p>
<p><a href="$document">OpenAPI document</a></p>
$operations
<h2>Shapes</h2>
$shapes
<script>
document.addEventListener("submit", async (event) => {
  event.preventDefault();
  const { method } = event.target.dataset;
  const path = event.target.dataset.path.replace(
    /{(\\w+)}/g, (_, name) => encodeURIComponent(prompt(name) ?? ""));
  const [body, output] = [event.target.querySelector("textarea"),
                          event.target.querySelector("pre")];
  const options = body
    ? { method, body: body.value, headers: { "content-type": "application/json" } }
    : { method };
  output.hidden = false;
  try {
    const answer = await fetch(path, options);
    output.textContent = answer.status + "\\n" + JSON.stringify(await answer.json(), null, 1);
  } catch (error) {
    output.textContent = String(error);
  }
});
</script>
</body>
</html>
""")

_OPERATION = Template("""<details>
<summary><b>$method</b> <code>$path</code> $summary</summary>
<p>$description</p>
<form data-method="$method" data-path="$path">$body<button>Send</button><pre hidden></pre></form>
<dl>$responses</dl>
</details>""")


class ApiPage(OpenAPIRenderPlugin):
    """Litestar plugin; the page needs no other address than its own."""

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        """The page as UTF-8."""
        info = openapi_schema["info"]
        return _PAGE.substitute(
            title=escape(info["title"]),
            version=escape(info["version"]),
            description=escape(info["description"]),
            document=escape(self.get_openapi_json_route(request)),
            operations="\n".join(_operations(openapi_schema["paths"])),
            shapes="\n".join(
                f"<details><summary><code>{escape(name)}</code></summary>{_pre(shape)}</details>"
                for name, shape in openapi_schema["components"]["schemas"].items()
            ),
        ).encode()


def _operations(paths: dict[str, Any]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            yield _OPERATION.substitute(
                method=method.upper(),
                path=escape(path),
                summary=escape(operation["summary"]),
                description=escape(operation["description"]),
                body=_body_field(operation),
                responses="".join(
                    f"<dt>{status} {escape(response['description'])}</dt>"
                    f"<dd>{_pre(response.get('content'))}</dd>"
                    for status, response in operation["responses"].items()
                ),
            )


def _body_field(operation: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    examples = [
        example["value"]
        for media in content.values()
        for example in media.get("examples", {}).values()
    ]
    return f'<textarea rows="4">{_json(examples[-1])}</textarea>' if examples else ""


def _pre(value: object) -> str:
    return f"<pre>{_json(value)}</pre>"


def _json(value: object) -> str:
    return escape(json.dumps(value, ensure_ascii=False, indent=1))
