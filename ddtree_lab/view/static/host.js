// Runs in the page around the viewer's frame: hands it the host's colours and gives it the height it asks
// for. The frame is sandboxed and never sees more of the host than these colours. Once a page is enough.
(() => {
  if (window.ddtreeLabHost) return;
  window.ddtreeLabHost = true;
  const names = ["layout-color0", "layout-color1", "ui-font-color1", "border-color1", "brand-color1", "ui-font-family", "code-font-family"].map((name) => `--jp-${name}`);
  names.push(...["editor-background", "editor-foreground", "panel-border", "focusBorder", "font-family", "editor-font-family"].map((name) => `--vscode-${name}`));
  const frames = () => [...document.querySelectorAll("iframe.ddtree-lab-frame")];
  const tell = (frame) => {
    const style = getComputedStyle(document.body);
    const variables = {};
    for (const name of names) if (style.getPropertyValue(name)) variables[name] = style.getPropertyValue(name).trim();
    frame.contentWindow?.postMessage({ ddtree: "theme", variables }, "*");
  };
  window.addEventListener("message", ({ source, data }) => {
    const frame = data?.ddtree && frames().find((one) => one.contentWindow === source);
    if (!frame) return;
    if (data.ddtree === "hello") tell(frame);
    if (data.ddtree === "hello" && frame.nextElementSibling?.matches(".ddtree-lab-still")) frame.nextElementSibling.hidden = true;
    if (data.ddtree === "size" && data.height > 0) frame.style.height = `${Math.min(Math.max(data.height, 160), 4000)}px`;
    if (data.ddtree === "leave") frame.closest("[tabindex]")?.focus();
  });
  const observer = new MutationObserver(() => setTimeout(() => frames().forEach(tell), 50));
  for (const element of [document.documentElement, document.body]) observer.observe(element, { attributes: true });
})();
