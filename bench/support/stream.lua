-- One chat that streams 64 tokens, for wrk; counts what is not a 200.
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{"messages": [{"role": "user", "content": "Tell me a story about a fox."}], ' ..
   '"max_tokens": 64, "temperature": 0, "ignore_eos": true, "stream": true}'

-- The last line is for the script that runs this: requests, failures, seconds, latencies in ms.
function done(summary, latency, requests)
   local errors = summary.errors
   local failures = errors.connect + errors.read + errors.write + errors.status + errors.timeout
   io.write(string.format("RESULT %d %d %.6f %.3f %.3f\n", summary.requests, failures,
      summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
