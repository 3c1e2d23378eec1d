// A request as JSON, beside programs that send it.

export function Try() {
  return (
    <section class="page">
      <h1>Try</h1>
    </section>
  );
}
