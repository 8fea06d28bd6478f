// The search runs in a worker, which browsers refuse to start for a page opened from a file. There, this class takes
// the worker's place: it runs the worker's script in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.appendChild(frame)
      const inner = frame.contentWindow
      const script = src => new Promise((done, failed) => {
        const element = inner.document.createElement("script")
        Object.assign(element, { src, async: false, onload: done, onerror: failed })
        inner.document.documentElement.appendChild(element)
      })
      inner.importScripts = (...urls) => urls.reduce((before, one) => before.then(() => script(one)), Promise.resolve())
      inner.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      }
      this.frame = frame
      this.ready = script(url)
    }
    postMessage(data) {
      this.ready.then(() => {
        const inner = this.frame.contentWindow
        inner.dispatchEvent(new inner.MessageEvent("message", { data }))
      })
    }
    terminate() {
      this.frame.remove()
    }
  }
}
