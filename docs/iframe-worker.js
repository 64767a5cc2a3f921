/* Search without a server: from a disk browsers start no worker, so its scripts run in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      this.inner = this.frame.contentWindow;
      this.inner.postMessage = (data) => setTimeout(() => this.answer(data));
      this.inner.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => this.run(new URL(each, url))), Promise.resolve());
      this.run(url).then(() => {
        this.isReady = true;
        this.waiting.splice(0).forEach((data) => this.ask(data));
      });
    }
    run(url) {
      return new Promise((done) => {
        const script = this.inner.document.createElement("script");
        script.src = url;
        script.onload = done;
        this.inner.document.body.append(script);
      });
    }
    postMessage(data) {
      this.isReady ? this.ask(data) : this.waiting.push(data);
    }
    ask(data) {
      this.inner.dispatchEvent(new MessageEvent("message", { data }));
    }
    answer(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }
    terminate() {
      this.frame.remove();
    }
  };
}
