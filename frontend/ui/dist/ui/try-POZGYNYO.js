import{i as n}from"./chunk-NPJVUHO4.js";function o(){return n("section",{class:"page",children:n("h1",{children:"Try"})})}export{o as Try};
