// Conversations with the model.

export function Chat() {
  return (
    <section class="page">
      <h1>Chat</h1>
    </section>
  );
}
