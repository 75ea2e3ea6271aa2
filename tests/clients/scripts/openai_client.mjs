// npm's openai: whole, streamed, helpers, completions, models and errors.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = "smollm2";
const answer = "The capital of France is Paris.";
const asked = {
  model,
  messages: [{ role: "user", content: "Name the capital of France." }],
  temperature: 0,
};

const { data: whole, request_id } = await client.chat.completions.create(asked).withResponse();
assert.equal(whole.choices[0].message.content, answer);
assert.equal(whole.id, `chatcmpl-${request_id}`);

const pieces = [];
let usage;
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ ...asked, ...options })) {
  pieces.push(chunk.choices[0]?.delta.content ?? "");
  usage = chunk.usage ?? usage;
}
assert.equal(pieces.join(""), answer);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);

const stream = client.chat.completions.stream({ ...asked, logprobs: true, top_logprobs: 2 });
const final = await stream.finalChatCompletion();
assert.equal(final.choices[0].message.content, answer);
assert.ok(final.choices[0].logprobs.content.every((entry) => entry.top_logprobs.length === 2));

const left = await client.chat.completions.create({ ...asked, stream: true, ignore_eos: true, max_tokens: 4000 });
for await (const chunk of left) {
  assert.equal(chunk.object, "chat.completion.chunk");
  break; // aborts the request
}

const text = await client.completions.create({ model, prompt: "The capital of France is", temperature: 0, max_tokens: 4 });
assert.ok(text.choices[0].text.startsWith(" Paris"));

const names = [];
for await (const each of client.models.list()) names.push(each.id);
assert.deepEqual(names, [model]);
assert.equal((await client.models.retrieve(model)).id, model);

await assert.rejects(client.chat.completions.create({ ...asked, top_p: 7 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.param, "top_p");
  assert.ok(error.requestID);
  return true;
});
await assert.rejects(client.chat.completions.create({ ...asked, model: "other" }), {
  status: 404,
  code: "model_not_found",
});
