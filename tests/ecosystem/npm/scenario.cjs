// What every client for Node is asked, as drivers/scenario.py has it for Python.
//
// A driver defines some of `chat`, `stream`, `call`, `structured`, `error` and calls `main`.
"use strict";

const [URL, MODEL, ...ARGUMENTS] = process.argv.slice(2);
const KEY = "none";
const QUESTION = "What is the capital of France?";
// Greedy decoding writes hundreds of tokens: the other model ends the same text, or refuses it.
const LONG_STORY =
  MODEL === "demo"
    ? "Write a very long story about a dragon, in 100 chapters."
    : "Count from 1 to 1000, one number per line.";
const WEATHER_QUESTION = "What is the weather in Oslo, in C? Use the tool get_weather.";
const PERSON_QUESTION = "Ada is 36 years old. Describe Ada.";
const MAX_TOKENS = 16;
const CALL_TOKENS = 100;
const STORY_TOKENS = 1500;
const PATIENCE_MS = 60000;

const FUNCTION = {
  name: "get_weather",
  description: "The weather of a city, today",
  parameters: {
    type: "object",
    properties: {
      city: { type: "string", maxLength: 8 },
      unit: { type: "string", enum: ["C", "F"] },
    },
    required: ["city", "unit"],
    additionalProperties: false,
  },
};
const PERSON = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 8 },
    age: { type: "integer", minimum: 0, maximum: 99 },
  },
  required: ["name", "age"],
  additionalProperties: false,
};

function check(holds, ...what) {
  if (!holds) throw new Error(what.map((one) => JSON.stringify(one)).join(" "));
}

async function gauge(name) {
  const text = await (await fetch(`${URL}/metrics`)).text();
  const lines = text.split("\n").filter((line) => line.startsWith(`headrace:${name}{`));
  return lines.reduce((sum, line) => sum + Number(line.split(" ").at(-1)), 0);
}

async function waitFor(name, value) {
  const deadline = Date.now() + PATIENCE_MS;
  while ((await gauge(name)) !== value) check(Date.now() < deadline, name, "is not", value);
}

function checkText(pieces) {
  const text = pieces.join("");
  check(text.includes("Paris") || (text && MODEL === "demo"), pieces);
}

function checkCall(call) {
  check(call, "there is no call");
  check(call.name === "get_weather", call);
  check(Object.keys(call.arguments).sort().join() === "city,unit", call);
  check(["C", "F"].includes(call.arguments.unit), call);
}

const SCENARIOS = {
  chat: async (driver) => checkText([await driver.chat(QUESTION, MAX_TOKENS)]),
  stream: async (driver) => {
    const pieces = [];
    for await (const piece of driver.stream(QUESTION, MAX_TOKENS)) pieces.push(piece);
    checkText(pieces);
    check(pieces.filter(Boolean).length > 1, pieces);
  },
  auto: async (driver) => {
    const call = await driver.call("auto", WEATHER_QUESTION, CALL_TOKENS);
    check(!call || call.name === "get_weather", call);
    return call ? "called" : "answered";
  },
  required: async (driver) => {
    checkCall(await driver.call("required", WEATHER_QUESTION, CALL_TOKENS));
  },
  named: async (driver) => checkCall(await driver.call("named", WEATHER_QUESTION, CALL_TOKENS)),
  structured: async (driver) => {
    const person = await driver.structured(PERSON_QUESTION, CALL_TOKENS);
    check(Object.keys(person).sort().join() === "age,name", person);
    check(person.name.length <= 8 && Number.isInteger(person.age), person);
    check(person.age >= 0 && person.age <= 99, person);
  },
  error: async (driver) => {
    try {
      await driver.error();
    } catch (refusal) {
      check(refusal instanceof driver.ERROR, refusal.constructor.name, refusal.message);
      check(refusal.message.includes("temperature"), refusal.message);
      return refusal.constructor.name;
    }
    throw new Error("there is no error");
  },
  abort: async (driver) => {
    await waitFor("num_requests_running", 0);
    const before = await gauge("aborted_sequences_total");
    for await (const _ of driver.stream(LONG_STORY, STORY_TOKENS)) {
      check((await gauge("num_requests_running")) === 1, "the stream has ended already");
      break;
    }
    await waitFor("num_requests_running", 0);
    const aborted = (await gauge("aborted_sequences_total")) - before;
    check(aborted === 1, "the stream has ended by itself");
  },
};

async function main(driver) {
  for (const [capability, scenario] of Object.entries(SCENARIOS)) {
    let outcome = "ok";
    let note = "";
    try {
      note = (await scenario(driver)) ?? "";
    } catch (problem) {
      console.error(problem);
      [outcome, note] = ["failed", `${problem.constructor.name}: ${problem.message}`];
    }
    console.log(JSON.stringify({ capability, outcome, note }));
  }
  process.exit(0); // connections that are kept alive would hold it
}

module.exports = { ARGUMENTS, FUNCTION, KEY, MODEL, PERSON, URL, main };
