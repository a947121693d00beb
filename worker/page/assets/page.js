// Keeps the page up to date: the server sends the content as it is now, and what differs is changed
// in place. So focus, open parts and what is being typed stay.
'use strict';

const content = document.getElementById('content');
const live = document.getElementById('live');
const hold = document.getElementById('hold');
let latest = null; // what came while the page holds still

function say(text, lost) {
  if (live.textContent !== text) live.textContent = text;
  live.classList.toggle('act', lost);
}

function change(from, to) {
  if (from.nodeType !== Node.ELEMENT_NODE) {
    if (from.data !== to.data) from.data = to.data;
    return;
  }
  if (from.hasAttribute('data-keep')) return;
  for (const { name } of [...from.attributes]) {
    if (!to.hasAttribute(name) && name !== 'open') from.removeAttribute(name);
  }
  for (const { name, value } of to.attributes) {
    if (from.getAttribute(name) !== value) from.setAttribute(name, value);
  }
  changeChildren(from, to);
}

function changeChildren(from, to) {
  const known = new Map();
  for (const child of from.children) if (child.id) known.set(child.id, child);
  let at = from.firstChild;
  for (const want of [...to.childNodes]) {
    const same = want.id ? known.get(want.id) : null;
    if (same && same.nodeName === want.nodeName) {
      if (same === at) at = at.nextSibling;
      else from.insertBefore(same, at);
      change(same, want);
    } else if (at && !at.id && !want.id && at.nodeType === want.nodeType && at.nodeName === want.nodeName) {
      const next = at.nextSibling;
      change(at, want);
      at = next;
    } else {
      from.insertBefore(document.importNode(want, true), at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function show(html) {
  const focused = document.activeElement;
  const news = new DOMParser().parseFromString('<main>' + html + '</main>', 'text/html').querySelector('main');
  changeChildren(content, news);
  const lost = document.getElementById('down') !== null;
  say((lost ? 'Lost, tried at ' : 'Live, ') + new Date().toISOString().slice(11, 19) + ' UTC', lost);
  if (focused && focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
}

hold.hidden = false;
hold.addEventListener('click', () => {
  const holding = hold.getAttribute('aria-pressed') !== 'true';
  hold.setAttribute('aria-pressed', String(holding));
  if (latest !== null) show(latest);
  latest = null;
  const lost = document.getElementById('down') !== null;
  if (holding) say('Held still', false);
  else if (events.readyState === EventSource.OPEN) say(lost ? 'Lost' : 'Live', lost);
  else events.onerror();
});

const events = new EventSource('./live?' + content.dataset.news);
events.onopen = () => document.getElementById('down') || say(hold.getAttribute('aria-pressed') === 'true' ? 'Held still' : 'Live', false);
events.onerror = () => say(events.readyState === EventSource.CLOSED ? 'Not live: load the page again' : 'Connection lost: trying again', true);
events.onmessage = (event) => {
  if (hold.getAttribute('aria-pressed') === 'true') latest = event.data;
  else show(event.data);
};
