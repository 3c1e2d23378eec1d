// Code with its colours. Loaded with what shows code.

import { createLowlight } from "lowlight";
import bash from "highlight.js/lib/languages/bash";
import cpp from "highlight.js/lib/languages/cpp";
import css from "highlight.js/lib/languages/css";
import diff from "highlight.js/lib/languages/diff";
import go from "highlight.js/lib/languages/go";
import java from "highlight.js/lib/languages/java";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import markdown from "highlight.js/lib/languages/markdown";
import python from "highlight.js/lib/languages/python";
import rust from "highlight.js/lib/languages/rust";
import sql from "highlight.js/lib/languages/sql";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";
import { useMemo } from "preact/hooks";
import type { ComponentChildren } from "preact";

import { CopyButton } from "./copy_button";

const LANGUAGES = {
  ...{ bash, cpp, css, diff, go, java, javascript, json, markdown, python, rust, sql, typescript },
  ...{ xml, yaml },
};
const MAX_LENGTH = 50_000; // characters; longer code has no colours

const lowlight = createLowlight(LANGUAGES);
lowlight.registerAlias({ bash: ["shell", "console"], cpp: ["c++", "cuda"], xml: ["vue"] });

type Nodes = ReturnType<typeof lowlight.highlight>["children"];

export function CodeBlock({ code, language }: { code: string; language?: string }) {
  const coloured = useMemo(() => colour(code, language), [code, language]);
  return (
    <div class="code-block">
      <div class="code-head">
        <span>{language}</span>
        <CopyButton text={code} label="Copy this code" />
      </div>
      <pre tabIndex={0}>
        <code>{coloured}</code>
      </pre>
    </div>
  );
}

function colour(code: string, language?: string): ComponentChildren {
  const known = language && lowlight.registered(language) && code.length < MAX_LENGTH;
  return known ? elements(lowlight.highlight(language, code).children) : code;
}

function elements(nodes: Nodes): ComponentChildren[] {
  return nodes.map((node) => {
    if (node.type === "text") return node.value;
    if (node.type !== "element") return null;
    const names = node.properties.className as string[];
    return <span class={names.join(" ")}>{elements(node.children as Nodes)}</span>;
  });
}
