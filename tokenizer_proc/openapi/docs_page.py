"""`/docs`: one page that lists what `/openapi.json` describes. It loads nothing from elsewhere."""

from html import escape

from headrace import __version__
from headrace.config.config import ModelCard
from headrace.tokenizer_proc.openapi.openapi import Operation, operations_of
from headrace.tokenizer_proc.openapi.schema_needs import never

CONTENT_TYPE = "text/html; charset=utf-8"
PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>Headrace</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }}
td, th {{ text-align: left; vertical-align: top; padding: .2em 1em .2em 0 }}
</style>
<h1>Headrace {version}</h1>
<p>This server has the model <b>{model}</b>. All fields are in
<a href="openapi.json">/openapi.json</a>.</p>
<table>
<tr><th>method<th>path<th>what it does<th>fields
{rows}
</table>
</html>
"""


def docs_page(card: ModelCard) -> bytes:
    """Return the page of a server of one model."""
    rows = "\n".join(map(row, operations_of(card)))
    return PAGE.format(version=escape(__version__), model=escape(card.name), rows=rows).encode()


def row(operation: Operation) -> str:
    """Return a path's line of the table."""
    route, request = operation.route, operation.bodies.request
    names = () if request is None else request.__struct_fields__
    gone = set[str]() if request is None else never(request.__name__)
    done = (escape(name) for name in names if name not in gone)
    fields = " ".join(f"<code>{name}</code>" for name in done)
    path, summary = escape(route.path), escape(route.summary)
    return f"<tr><td>{route.method}<td><code>{path}</code><td>{summary}<td>{fields}"
