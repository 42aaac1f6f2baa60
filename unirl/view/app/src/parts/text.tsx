// Text that a model, a tool or a user wrote: as text, whatever is in it, and the beginning of it where it is long.

import { useState } from "preact/hooks";
import { number, visible } from "../data/format";

const PAGE = 2000;

export function Text({ children, most = PAGE }: { children: string; most?: number }) {
  const [shown, setShown] = useState(most);
  return (
    <>
      <pre class="textbox">{visible(children.slice(0, shown))}</pre>
      {children.length > shown && (
        <button type="button" onClick={() => setShown(shown + PAGE * 10)}>
          Show more: {number(children.length - shown)} characters are left
        </button>
      )}
    </>
  );
}
