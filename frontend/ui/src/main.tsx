import { render } from "preact";

import { App } from "./app";
import { describe } from "./server";

render(<App />, document.getElementById("app")!);
void describe();
