// Markdown as elements. marked only reads it: no text becomes HTML, and HTML in a text is text.
// Images are shown as links, since a page that fetches what a model names would tell its address.

import { Lexer, type Token, type Tokens } from "marked";
import type { ComponentChildren } from "preact";
import { useMemo } from "preact/hooks";

import { CodeBlock } from "../code_block";

const SAFE_LINK = /^(https?:|mailto:)/i;
const ENTITIES: Record<string, string> = {
  ...{ "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'" },
};

export function Markdown({ text }: { text: string }) {
  const tokens = useMemo(() => new Lexer({ gfm: true }).lex(text), [text]);
  return (
    <div class="markdown">
      {tokens.map((token, at) => (
        <Block key={at} token={token} />
      ))}
    </div>
  );
}

// While an answer grows only its last block changes; the others keep their elements.
function Block({ token }: { token: Token }) {
  return useMemo(() => <>{block(token)}</>, [token.raw]);
}

function block(token: Token): ComponentChildren {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "hr":
      return <hr />;
    case "heading": {
      const Heading = `h${Math.min(token.depth + 2, 6)}` as "h3";
      return <Heading>{inline(token.tokens)}</Heading>;
    }
    case "code":
      return <CodeBlock code={token.text} language={token.lang?.split(/\s/)[0]?.toLowerCase()} />;
    case "blockquote":
      return <blockquote>{blocks(token.tokens)}</blockquote>;
    case "list":
      return list(token as Tokens.List);
    case "table":
      return table(token as Tokens.Table);
    case "paragraph":
      return <p>{inline(token.tokens)}</p>;
    case "text":
      return token.tokens ? inline(token.tokens) : plain(token.text);
    default:
      return <p>{token.raw}</p>;
  }
}

function blocks(tokens: Token[] = []): ComponentChildren[] {
  return tokens.map((token) => block(token));
}

function list(token: Tokens.List): ComponentChildren {
  const items = token.items.map((item) => (
    <li>
      {item.task && <input type="checkbox" disabled checked={item.checked} aria-label="Task" />}
      {blocks(item.tokens)}
    </li>
  ));
  return token.ordered ? <ol start={Number(token.start) || 1}>{items}</ol> : <ul>{items}</ul>;
}

function table(token: Tokens.Table): ComponentChildren {
  const cells = (Cell: "td" | "th", row: Tokens.TableCell[]) => (
    <tr>
      {row.map((cell) => (
        <Cell class={cell.align ?? undefined}>{inline(cell.tokens)}</Cell>
      ))}
    </tr>
  );
  return (
    <div class="table" tabIndex={0}>
      <table>
        <thead>{cells("th", token.header)}</thead>
        <tbody>{token.rows.map((row) => cells("td", row))}</tbody>
      </table>
    </div>
  );
}

function inline(tokens: Token[] = []): ComponentChildren[] {
  return tokens.map((token) => {
    switch (token.type) {
      case "strong":
        return <strong>{inline(token.tokens)}</strong>;
      case "em":
        return <em>{inline(token.tokens)}</em>;
      case "del":
        return <del>{inline(token.tokens)}</del>;
      case "codespan":
        return <code>{token.text}</code>;
      case "br":
        return <br />;
      case "link":
        return link(token.href, inline(token.tokens));
      case "image":
        return link(token.href, token.text || token.href);
      case "text":
        return token.tokens ? inline(token.tokens) : plain(token.text);
      case "escape":
        return plain(token.text);
      default:
        return token.raw;
    }
  });
}

function link(href: string, content: ComponentChildren): ComponentChildren {
  if (!SAFE_LINK.test(href)) return content;
  return (
    <a href={href} target="_blank" rel="noopener noreferrer">
      {content}
    </a>
  );
}

// marked leaves entities in texts; these are the common ones.
function plain(text: string): string {
  return text.replace(/&(amp|lt|gt|quot|#39);/g, (entity) => ENTITIES[entity]!);
}
