// ai, Vercel's SDK: with @ai-sdk/openai-compatible, or by responses with @ai-sdk/openai.
"use strict";

const { APICallError, Output, generateText, jsonSchema, streamText, tool } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { ARGUMENTS, FUNCTION, KEY, MODEL, PERSON, URL, main } = require("./scenario.cjs");

const options = { name: "headrace", baseURL: `${URL}/v1`, apiKey: KEY };
const model =
  ARGUMENTS[0] === "responses"
    ? createOpenAI(options).responses(MODEL)
    : createOpenAICompatible({ ...options, supportsStructuredOutputs: true }).chatModel(MODEL);

function asked(prompt, maxOutputTokens, fields) {
  return { model, prompt, maxOutputTokens, temperature: 0, maxRetries: 0, ...fields };
}

async function chat(question, maxTokens) {
  return (await generateText(asked(question, maxTokens))).text;
}

async function* stream(question, maxTokens) {
  const leaving = new AbortController();
  const told = streamText(asked(question, maxTokens, { abortSignal: leaving.signal }));
  try {
    yield* told.textStream;
  } finally {
    leaving.abort();
  }
}

async function call(choice, question, maxTokens) {
  const { name, description, parameters } = FUNCTION;
  const answer = await generateText(
    asked(question, maxTokens, {
      tools: { [name]: tool({ description, inputSchema: jsonSchema(parameters) }) },
      toolChoice: choice === "named" ? { type: "tool", toolName: name } : choice,
    }),
  );
  const called = answer.toolCalls[0];
  return called && { name: called.toolName, arguments: called.input };
}

async function structured(question, maxTokens) {
  const output = Output.object({ schema: jsonSchema(PERSON) });
  return (await generateText(asked(question, maxTokens, { output }))).output;
}

const error = () => generateText(asked("Hello.", 16, { temperature: -1 }));

main({ chat, stream, call, structured, error, ERROR: APICallError });
