import{g as n}from"./chunk-K2SAHZMB.js";function i(){return n("section",{class:"page",children:n("h1",{children:"Ring"})})}export{i as Ring};
