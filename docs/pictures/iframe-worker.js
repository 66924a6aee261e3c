// Browsers start no workers on pages that are opened as files, and the search runs in one. There, this runs a
// worker's script in a hidden frame instead. On a web server it does nothing.
class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    const inside = frame.contentWindow;
    const load = (source) =>
      new Promise((loaded, failed) => {
        const script = inside.document.createElement("script");
        Object.assign(script, { src: source, onload: loaded, onerror: failed });
        inside.document.body.append(script);
      });
    inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    inside.importScripts = (...sources) => sources.reduce((ready, one) => ready.then(() => load(one)), Promise.resolve());
    this.terminate = () => frame.remove();
    this.ready = load(url).then(() => inside);
  }

  postMessage(data) {
    this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
  }
}

window.IFrameWorker = IFrameWorker; // the search's script looks for this name
if (location.protocol === "file:") window.Worker = IFrameWorker;
