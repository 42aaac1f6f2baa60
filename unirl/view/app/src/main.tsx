// Starts the page in #app.

import { render } from "preact";
import { App } from "./app";
import { openSource } from "./data/source";
import "uplot/dist/uPlot.min.css";
import "./styles/base.css";
import "./styles/parts.css";
import "./styles/pages.css";
import "./styles/tokens.css";

const root = document.getElementById("app");
if (root) render(<App source={openSource()} />, root);
