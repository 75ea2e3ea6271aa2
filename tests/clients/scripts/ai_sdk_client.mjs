// The AI SDK through @ai-sdk/openai-compatible: whole, streamed, completions and errors.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText } from "ai";

const metal = createOpenAICompatible({
  name: "metal",
  baseURL: `${process.argv[2]}/v1`,
  includeUsage: true,
});
const prompt = "Name the capital of France.";
const answer = "The capital of France is Paris.";
const asked = { model: metal("smollm2"), prompt, temperature: 0, maxRetries: 0 };

const whole = await generateText(asked);
assert.equal(whole.text, answer);
assert.equal(whole.finishReason, "stop");
assert.equal(whole.usage.outputTokens, 8);

const streamed = streamText(asked);
const pieces = await Array.fromAsync(streamed.textStream);
assert.equal(pieces.join(""), answer);
assert.equal(await streamed.finishReason, "stop");
assert.equal((await streamed.usage).totalTokens, whole.usage.totalTokens);

const cut = await generateText({ ...asked, maxOutputTokens: 3, seed: 1, stopSequences: ["never"] });
assert.equal(cut.finishReason, "length");

const text = await generateText({
  ...asked,
  model: metal.completionModel("smollm2"),
  prompt: "The capital of France is",
  maxOutputTokens: 4,
});
assert.ok(text.text.length > 0);

await assert.rejects(generateText({ ...asked, topP: 7 }), (error) => {
  assert.ok(APICallError.isInstance(error));
  assert.equal(error.statusCode, 400);
  assert.match(error.message, /top_p/);
  return true;
});
