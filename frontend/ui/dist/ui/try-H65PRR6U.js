import{a as g}from"./chunk-IX4SBVDX.js";import"./chunk-HEE342E5.js";import{a as l,f as v,q as b,r as S}from"./chunk-BAJMQJX5.js";import{j as h,n}from"./chunk-UXAFQEKH.js";var w=["curl","Python","JavaScript"],m="API_KEY";function $(e,o,r){switch(e){case"curl":return{code:E(o,r),syntax:"bash"};case"Python":return{code:j(o,r),syntax:"python"};case"JavaScript":return{code:P(o,r),syntax:"javascript"}}}function E(e,o){let r=o.replaceAll("'","'\\''");return`curl --no-buffer ${e} \\
  -H "Authorization: Bearer $${m}" \\
  -H 'Content-Type: application/json' \\
  -d '${r}'`}function j(e,o){return`import os

import httpx

key = os.environ.get("${m}", "")
body = ${f(x(o))}
headers = {"Authorization": f"Bearer {key}"}
with httpx.stream("POST", "${e}", json=body, headers=headers, timeout=None) as response:
    for line in response.iter_lines():
        print(line)`}function P(e,o){return`const key = process.env.${m} ?? "";
const body = ${JSON.stringify(x(o),null,2)};
const response = await fetch("${e}", {
  method: "POST",
  headers: { Authorization: \`Bearer \${key}\`, "Content-Type": "application/json" },
  body: JSON.stringify(body),
});
for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
  process.stdout.write(piece);
}`}function x(e){try{return JSON.parse(e)}catch{return{}}}function f(e,o=""){let r=`${o}    `;if(e===null)return"None";if(e===!0)return"True";if(e===!1)return"False";if(Array.isArray(e)){let t=e.map(a=>`${r}${f(a,r)},
`);return t.length?`[
${t.join("")}${o}]`:"[]"}if(typeof e=="object"){let t=Object.entries(e).map(([a,s])=>`${r}${JSON.stringify(a)}: ${f(s,r)},
`);return t.length?`{
${t.join("")}${o}}`:"{}"}return JSON.stringify(e)}var O="headrace.try",c=l([]),u=l("v1/chat/completions"),i=l(sessionStorage.getItem(O)??""),y=l("curl"),A=l(null),d=l(null);async function R(){if(c.value.length)return;let{paths:e}=await S("openapi.json");c.value=Object.entries(e).flatMap(([o,{post:r}])=>{let t=r?.requestBody?.content["application/json"]?.examples??{};return Object.entries(t).map(([a,{value:s}])=>({path:o.slice(1),title:a,body:s}))}),!i.value&&c.value.length&&N(0)}function N(e){let o=c.value[e];u.value=o.path,T(JSON.stringify(o.body,null,2))}function T(e){i.value=e,sessionStorage.setItem(O,e)}function C(){try{return JSON.parse(i.value),null}catch(e){return e.message}}async function L(){let e=d.value=new AbortController,o=performance.now(),r="",t=null,a=s=>A.value={text:r,status:t,seconds:s};a(null);try{let s=await b(u.value,JSON.parse(i.value),e.signal);t=s.status;let p=s.body.pipeThrough(new TextDecoderStream).getReader();for(;;){let{done:J,value:k}=await p.read();if(J)break;r+=k,a(null)}r=I(r)}catch(s){s instanceof v&&(t=s.status);let p=e.signal.aborted?"Stopped.":s.message;r=r?`${r}
${p}`:p}a((performance.now()-o)/1e3),d.value=null}function I(e){try{return JSON.stringify(JSON.parse(e),null,2)}catch{return e}}function K(){return h(()=>{R().catch(()=>{})},[]),n("section",{class:"page try",children:[n("h1",{children:"Try a request"}),n("div",{class:"columns",children:[n(B,{}),n(q,{})]}),n(G,{})]})}function B(){let e=C(),o=c.value,r=o.findIndex(t=>t.path===u.value&&JSON.stringify(t.body,null,2)===i.value);return n("form",{onSubmit:t=>(t.preventDefault(),void L()),children:[n("label",{class:"field",children:[n("span",{children:"Example"}),n("select",{value:r,onChange:t=>N(Number(t.currentTarget.value)),children:[r<0&&n("option",{value:-1,children:["Your request to /",u.value]}),o.map((t,a)=>n("option",{value:a,children:["/",t.path,": ",t.title]}))]})]}),n("label",{class:"field",children:[n("span",{children:["Body of POST /",u.value]}),n("textarea",{class:"code",rows:16,spellcheck:!1,value:i.value,"aria-invalid":e!==null,onInput:t=>T(t.currentTarget.value)})]}),n("div",{class:"row",children:[d.value?n("button",{type:"button",class:"primary",onClick:()=>d.value?.abort(),children:"Stop"}):n("button",{type:"submit",class:"primary",disabled:e!==null,children:"Send"}),e&&i.value&&n("span",{class:"wrong",role:"status",children:e})]})]})}function q(){let e=new URL(u.value,document.baseURI).href,{code:o,syntax:r}=$(y.value,e,i.value);return n("div",{children:[n("fieldset",{class:"choice",children:[n("legend",{children:"The same as a program"}),w.map(t=>n("label",{children:[n("input",{type:"radio",name:"language",checked:t===y.value,onChange:()=>y.value=t}),n("span",{children:t})]}))]}),n(g,{code:o,language:r})]})}function G(){let e=A.value;if(!e)return null;let{status:o,seconds:r,text:t}=e;return n("section",{"aria-label":"Response",class:"reply",children:[n("h2",{children:"Response"}),n("p",{class:"muted",role:"status",children:[o?`Status ${o}`:r===null?"Waiting \u2026":"No response",r!==null&&` after ${r.toFixed(2)} s`]}),t&&n(g,{code:t,language:t.startsWith("{")?"json":"text"})]})}export{K as Try};
