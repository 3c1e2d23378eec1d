// @anthropic-ai/sdk: messages.
"use strict";

const Anthropic = require("@anthropic-ai/sdk");
const { FUNCTION, KEY, MODEL, PERSON, URL, main } = require("./scenario.cjs");

const client = new Anthropic({ baseURL: URL, apiKey: KEY, maxRetries: 0 });
const CHOICES = {
  auto: { type: "auto" },
  required: { type: "any" },
  named: { type: "tool", name: FUNCTION.name },
};

function asked(question, max_tokens, fields) {
  const messages = [{ role: "user", content: question }];
  return { model: MODEL, messages, max_tokens, temperature: 0, ...fields };
}

const textOf = (answer) => answer.content.find((block) => block.type === "text").text;

async function chat(question, maxTokens) {
  return textOf(await client.messages.create(asked(question, maxTokens)));
}

async function* stream(question, maxTokens) {
  for await (const event of client.messages.stream(asked(question, maxTokens))) {
    if (event.type === "content_block_delta") yield event.delta.text ?? "";
  }
}

async function call(choice, question, maxTokens) {
  const { name, description, parameters } = FUNCTION;
  const answer = await client.messages.create(
    asked(question, maxTokens, {
      tools: [{ name, description, input_schema: parameters }],
      tool_choice: { ...CHOICES[choice], disable_parallel_tool_use: true },
    }),
  );
  const use = answer.content.find((block) => block.type === "tool_use");
  return use && { name: use.name, arguments: use.input };
}

async function structured(question, maxTokens) {
  const output_config = { format: { type: "json_schema", schema: PERSON } };
  const answer = await client.messages.create(asked(question, maxTokens, { output_config }));
  return JSON.parse(textOf(answer));
}

const error = () => client.messages.create(asked("Hello.", 8, { temperature: -1 }));

main({ chat, stream, call, structured, error, ERROR: Anthropic.BadRequestError });
