// The live widget (anywidget's interface): the same page, with a kernel that answers.
import { mount } from "./viewer.js";

/** Called by anywidget for each display of the widget. */
function renderWidget({ model, el }) {
  const waiting = new Map();
  let last = 0;
  const request = (message) =>
    new Promise((resolve, reject) => {
      waiting.set(++last, { resolve, reject });
      model.send({ ...message, id: last });
    });
  const onMessage = ({ id, payload, error }) => {
    const asked = waiting.get(id);
    waiting.delete(id);
    if (error) asked?.reject(new Error(error));
    else asked?.resolve(payload);
  };
  const select = (round, node) => model.send({ kind: "select", round, node });
  const view = mount({ payload: model.get("payload"), el, host: { request, select } });
  const onPayload = () => view.replace(model.get("payload"));
  model.on("msg:custom", onMessage);
  model.on("change:payload", onPayload);
  return () => {
    model.off("msg:custom", onMessage);
    model.off("change:payload", onPayload);
    view.destroy();
  };
}

export default { render: renderWidget };
