// openai: chat completions.
"use strict";

const OpenAI = require("openai");
const { FUNCTION, KEY, MODEL, PERSON, URL, main } = require("./scenario.cjs");

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0 });

function ask(question, max_tokens, fields) {
  const messages = [{ role: "user", content: question }];
  const asked = { model: MODEL, messages, max_tokens, temperature: 0, ...fields };
  return client.chat.completions.create(asked);
}

async function chat(question, maxTokens) {
  return (await ask(question, maxTokens)).choices[0].message.content;
}

async function* stream(question, maxTokens) {
  for await (const chunk of await ask(question, maxTokens, { stream: true })) {
    yield chunk.choices[0].delta.content ?? "";
  }
}

async function call(choice, question, maxTokens) {
  const named = { type: "function", function: { name: FUNCTION.name } };
  const answer = await ask(question, maxTokens, {
    tools: [{ type: "function", function: FUNCTION }],
    tool_choice: choice === "named" ? named : choice,
    parallel_tool_calls: false,
  });
  const called = answer.choices[0].message.tool_calls?.[0]?.function;
  return called && { name: called.name, arguments: JSON.parse(called.arguments) };
}

async function structured(question, maxTokens) {
  const json_schema = { name: "Person", schema: PERSON, strict: true };
  const response_format = { type: "json_schema", json_schema };
  const answer = await ask(question, maxTokens, { response_format });
  return JSON.parse(answer.choices[0].message.content);
}

const error = () => ask("Hello.", 8, { temperature: -1 });

main({ chat, stream, call, structured, error, ERROR: OpenAI.BadRequestError });
