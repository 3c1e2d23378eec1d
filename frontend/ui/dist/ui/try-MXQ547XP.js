import{g as n}from"./chunk-K2SAHZMB.js";function o(){return n("section",{class:"page",children:n("h1",{children:"Try"})})}export{o as Try};
