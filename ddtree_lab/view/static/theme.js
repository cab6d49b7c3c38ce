// Dark or light, after whoever shows the page. Colours come through CSS variables; what is left is to
// take them over a frame's border and to tell form controls and scroll bars.

const NAMES = /^--(jp|vscode)-[\w-]+$/;
const VALUE = /^[\w\s#%.,()'"-]*$/;

/** Keep an element in its host's theme; returns what ends that. */
export function keepTheme(root) {
  const adopt = () => (root.style.colorScheme = isDark(root) ? "dark" : "light");
  const onMessage = ({ source, data }) => {
    if (source !== window.parent || data?.ddtree !== "theme") return;
    for (const [name, value] of Object.entries(data.variables ?? {}))
      if (NAMES.test(name) && VALUE.test(value)) document.documentElement.style.setProperty(name, value);
    adopt();
  };
  const observer = new MutationObserver(adopt);
  for (const element of [document.documentElement, document.body]) observer.observe(element, { attributes: true });
  const system = matchMedia("(prefers-color-scheme: dark)");
  system.addEventListener("change", adopt);
  let sizes = null;
  if (window.parent !== window) {
    window.addEventListener("message", onMessage);
    const tell = () => window.parent.postMessage({ ddtree: "size", height: Math.ceil(document.documentElement.getBoundingClientRect().height) }, "*");
    sizes = new ResizeObserver(tell);
    sizes.observe(document.documentElement);
    window.parent.postMessage({ ddtree: "hello" }, "*");
  }
  requestAnimationFrame(adopt);
  return () => {
    observer.disconnect();
    sizes?.disconnect();
    system.removeEventListener("change", adopt);
    window.removeEventListener("message", onMessage);
  };
}

function isDark(element) {
  const [r, g, b] = getComputedStyle(element).backgroundColor.match(/[\d.]+/g)?.map(Number) ?? [255, 255, 255];
  const scale = getComputedStyle(element).backgroundColor.startsWith("color(") ? 255 : 1;
  return (0.299 * r + 0.587 * g + 0.114 * b) * scale < 128;
}
