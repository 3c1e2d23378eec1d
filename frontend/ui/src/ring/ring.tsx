// The processes of the server as the ring they are.

export function Ring() {
  return (
    <section class="page">
      <h1>Ring</h1>
    </section>
  );
}
