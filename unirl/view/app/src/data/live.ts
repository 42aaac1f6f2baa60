// News of the server for all parts of the page over one connection: a browser opens few to one server. A page that
// is hidden has none, and asks again for all when it is seen.

import { url } from "./source";

export interface LiveHandlers {
  /** There are new rows or events of the runs. */
  rows?: () => void;
  /** The list of runs has changed, or a line of it. */
  list?: () => void;
}

interface Subscriber {
  runs: string[];
  handlers: LiveHandlers;
}

export class LiveHub {
  private readonly subscribers = new Set<Subscriber>();
  private readonly watchers = new Set<(isOpen: boolean) => void>();
  private events: EventSource | null = null;
  private watched = "";
  private isPlanned = false;
  private isOpen = false;

  constructor() {
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.close();
      else this.plan();
    });
  }

  subscribe(runs: string[], handlers: LiveHandlers): () => void {
    const subscriber = { runs, handlers };
    this.subscribers.add(subscriber);
    this.plan();
    return () => {
      this.subscribers.delete(subscriber);
      this.plan();
    };
  }

  onConnection(watcher: (isOpen: boolean) => void): () => void {
    this.watchers.add(watcher);
    watcher(this.isOpen);
    return () => this.watchers.delete(watcher);
  }

  /** Parts of a page come and go together: the connection is changed once for all. */
  private plan(): void {
    if (this.isPlanned) return;
    this.isPlanned = true;
    setTimeout(() => {
      this.isPlanned = false;
      this.connect();
    }, 50);
  }

  private connect(): void {
    if (document.hidden || !this.subscribers.size) return this.close();
    const runs = [...new Set([...this.subscribers].flatMap((each) => each.runs))].sort().join(",");
    if (this.events && this.events.readyState !== EventSource.CLOSED && runs === this.watched) return;
    this.close();
    this.watched = runs;
    const events = new EventSource(url("/api/live", { runs }));
    this.events = events;
    const tell = (call: (each: Subscriber) => void) => this.subscribers.forEach(call);
    const ofRun = (message: Event) => (JSON.parse((message as MessageEvent<string>).data) as { run?: string }).run;
    const rows = (message: Event) => {
      const run = ofRun(message);
      tell((each) => (run === undefined || each.runs.includes(run)) && each.handlers.rows?.());
    };
    for (const kind of ["row", "event", "lost"]) events.addEventListener(kind, rows);
    events.addEventListener("state", (message) => {
      rows(message);
      tell((each) => each.handlers.list?.());
    });
    events.addEventListener("runs", () => tell((each) => each.handlers.list?.()));
    events.addEventListener("open", () => this.setOpen(true));
    // What was written before the server looked, or while there was no connection, is asked for.
    events.addEventListener("watching", () => tell(({ handlers }) => (handlers.rows?.(), handlers.list?.())));
    events.addEventListener("error", () => {
      this.setOpen(false);
      // A browser tries again by itself, but not where the answer was an error.
      if (events.readyState === EventSource.CLOSED) setTimeout(() => this.events === events && this.plan(), 5000);
    });
  }

  private close(): void {
    this.events?.close();
    this.events = null;
  }

  private setOpen(isOpen: boolean): void {
    this.isOpen = isOpen;
    this.watchers.forEach((watcher) => watcher(isOpen));
  }
}
