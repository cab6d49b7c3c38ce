// Changing a round's tree and asking the model again; only where a kernel listens.
import { count, h, panel } from "./marks.js";
import { treeOf } from "./record.js";

const PATIENCE = 10000; // milliseconds before the page says that no answer has come

/**
 * The panel for edits.
 *
 * @param {{request: (message: object) => Promise<object>}} host
 * @param {{edits: () => object[], change: (edits: object[]) => void, answer: (payload: object) => string}} actions
 */
export function editPanel(host, actions) {
  const text = h("input", { type: "text", id: `ddt-child-${++panels}`, list: `ddt-tokens-${panels}`, size: "12", autocomplete: "off" });
  const tokens = h("datalist", { id: `ddt-tokens-${panels}` });
  const button = (words, onclick) => h("button", { type: "button", onclick }, words);
  const status = h("p", { class: "ddt-status", role: "status" });
  const alarm = h("p", { class: "ddt-alarm", role: "alert" });
  let view = null;

  const change = (...added) => {
    alarm.textContent = "";
    actions.change([...actions.edits(), ...added]);
  };
  const add = () => {
    if (!text.value) return void (alarm.textContent = "Type the token that the new child should have.");
    const spelled = text.value.replaceAll("␣", " ").replaceAll("↵", "\n").replaceAll("⇥", "\t");
    const known = view.round.target_top?.[view.node]?.find(([, shown]) => shown === text.value);
    change({ add: { parent: view.node, text: known ? known[1] : spelled, id: known ? known[0] : null } });
    text.value = "";
  };
  const ask = async (force) => {
    const { places, ...tree } = treeOf({ ...view.round, states: view.round.states ?? view.states });
    alarm.textContent = "";
    status.textContent = "The model verifies this tree …";
    controls.disabled = true;
    const late = setTimeout(() => (status.textContent = "No answer yet. If the kernel has gone, this picture is the last one."), PATIENCE);
    try {
      const place = force === null ? null : places.indexOf(force);
      const payload = await host.request({ kind: "verify", round: view.roundIndex, tree, force: place });
      status.textContent = `Verified again by the model. ${actions.answer(payload)}`;
    } catch (fault) {
      status.textContent = "";
      alarm.textContent = String(fault.message ?? fault);
    } finally {
      clearTimeout(late);
      controls.disabled = false;
    }
  };
  text.addEventListener("keydown", (event) => event.key === "Enter" && add());

  const cut = button("Cut this branch", () => change({ cut: view.node }));
  const force = button("Force this path", () => ask(view.node));
  const undo = button("Undo edits", () => actions.change([]));
  const verify = h("button", { type: "button", class: "ddt-main", onclick: () => ask(null) }, "Verify again");
  const controls = h("fieldset", {}, h("legend", { class: "ddt-hidden" }, "Edit the tree"),
    h("label", { for: text.id }, "child with token "), text, tokens, button("Add", add), cut, force, undo, verify);
  const where = h("p", { class: "ddt-note" });
  return {
    element: panel("edit", "Change the tree and verify again", where, controls, status, alarm),
    restyle(now) {
      view = now;
      const { node, round } = view;
      where.textContent = node < 0 ? "Select a node of the tree to change it." : `At node ${node}, “${round.texts[node]}”. ${count(actions.edits().length, "edit")} not verified yet.`;
      tokens.replaceChildren(...(round.target_top?.[node] ?? []).map(([, shown]) => h("option", { value: shown })));
      for (const control of [text, force]) control.disabled = node < 0;
      cut.disabled = node < 1;
      undo.disabled = !actions.edits().length;
    },
  };
}

let panels = 0;
