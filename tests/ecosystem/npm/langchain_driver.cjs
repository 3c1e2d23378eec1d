// langchain: its model of OpenAI's API, and the agent that runs it.
"use strict";

const { ChatOpenAI } = require("@langchain/openai");
const { createAgent, tool } = require("langchain");
const { BadRequestError } = require("openai");
const { FUNCTION, KEY, MODEL, PERSON, URL, main } = require("./scenario.cjs");

function chatModel(maxTokens, temperature = 0) {
  const configuration = { baseURL: `${URL}/v1` };
  const fields = { model: MODEL, apiKey: KEY, maxTokens, temperature, maxRetries: 0 };
  return new ChatOpenAI({ ...fields, configuration });
}

async function chat(question, maxTokens) {
  return (await chatModel(maxTokens).invoke(question)).text;
}

async function* stream(question, maxTokens) {
  const leaving = new AbortController();
  try {
    const chunks = await chatModel(maxTokens).stream(question, { signal: leaving.signal });
    for await (const chunk of chunks) yield chunk.text;
  } finally {
    leaving.abort();
  }
}

async function call(choice, question, maxTokens) {
  const { name, description, parameters } = FUNCTION;
  if (choice === "auto") {
    const called = [];
    const weather = tool(
      (given) => {
        called.push({ name, arguments: given });
        return "7 degrees, rain";
      },
      { name, description, schema: parameters },
    );
    const agent = createAgent({ model: chatModel(maxTokens), tools: [weather] });
    const messages = [{ role: "user", content: question }];
    await agent.invoke({ messages }, { recursionLimit: 6 }).catch((problem) => {
      if (!called.length) throw problem;
    });
    return called[0];
  }
  const bound = chatModel(maxTokens).bindTools([{ type: "function", function: FUNCTION }], {
    tool_choice: choice === "named" ? name : choice,
    parallel_tool_calls: false,
  });
  const made = (await bound.invoke(question)).tool_calls[0];
  return made && { name: made.name, arguments: made.args };
}

function structured(question, maxTokens) {
  const options = { method: "jsonSchema", name: "Person" };
  return chatModel(maxTokens).withStructuredOutput(PERSON, options).invoke(question);
}

const error = () => chatModel(8, -1).invoke("Hello.");

main({ chat, stream, call, structured, error, ERROR: BadRequestError });
